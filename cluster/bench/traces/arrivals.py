"""When requests come."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import count


def arrival_times(
    rng: random.Random, *, requests: int, rate: float, rate_end: float | None = None, burstiness: float = 1.0
) -> Iterator[float]:
    """Times of arrivals in seconds, in order, without end; those of a ramp go on at its last rate.

    Gaps are drawn with a mean of 1 and then stretched so that ``rate`` of them, and in the end ``rate_end``, fall into
    a second: a ramp thereby keeps the kind of its gaps.

    Args:
        rng: for the gaps.
        requests: that a ramp takes from its first to its last rate.
        rate: a second.
        rate_end: a second, at the end of a ramp; as ``rate`` without.
        burstiness: shape of the gamma distribution of gaps; infinity for equal ones.
    """
    last = rate if rate_end is None else rate_end
    passed = 0.0
    for _ in count():
        passed += 1.0 if math.isinf(burstiness) else rng.gammavariate(burstiness, 1.0 / burstiness)
        yield _stretched(passed, requests, rate, last)


def _stretched(passed: float, requests: int, first: float, last: float) -> float:
    """The time by which a rate that goes from ``first`` to ``last`` over ``requests`` adds up to ``passed``."""
    seconds = 2.0 * requests / (first + last)
    if passed > requests:
        return seconds + (passed - requests) / last
    growth = (last - first) / seconds
    return 2.0 * passed / (first + math.sqrt(max(0.0, first * first + 2.0 * growth * passed)))
