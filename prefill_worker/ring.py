"""A ring of waits: leases here wait for room at a decode worker, where room waits for a prompt that has no room here.

Two routers that ask in opposite orders make one, and so do two decode workers of which one is full.
"""

from __future__ import annotations

import math

PATIENCE = 1.0
"""Seconds that a prompt whose reader is ready waits for blocks of leases whose readers are not."""


class Ring:
    """Decides when a lease is given back to break a ring; pure."""

    def __init__(self) -> None:
        self._since = math.inf

    def holds(self, now: float, *, ready: bool) -> bool:
        """Whether it has lasted too long.

        Args:
            now: monotonic seconds.
            ready: whether the next prompt finds no room though its reader is ready and nothing is computed.
        """
        if not ready:
            self._since = math.inf
            return False
        self._since = min(self._since, now)
        return now - self._since >= PATIENCE

    def broken(self, now: float) -> None:
        """A lease was given back: the prompt waits anew."""
        self._since = now
