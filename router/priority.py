"""Which request goes first: its priority and what it has waited, as one number.

A unit of priority weighs as much as ``aging`` seconds of waiting. So two requests never change places, and one of a low
priority waits for others of a higher only if they came within ``aging`` times the difference after it: nobody starves.
Workers keep their queues by this number, the highest first, and the router keeps none.
"""

from __future__ import annotations

MAX_PRIORITY = 100
"""Priorities lie within this distance of 0."""


def seniority(waited: float, priority: int, aging: float) -> float:
    """The seconds that a request counts as having waited.

    Args:
        waited: seconds since it came, over all of its attempts.
        priority: the client's; lower is earlier, as in vLLM.
        aging: seconds that a unit of it is worth.
    """
    return waited - priority * aging
