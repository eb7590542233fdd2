"""What is said of many measurements. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec


class Latency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Percentiles by nearest rank, in seconds: each is a time that was really measured.

    Attributes:
        p50, p90, p99: as named; of fewer than a hundred samples p99 is the slowest.
        samples: how many there were.
    """

    p50: float
    p90: float
    p99: float
    samples: int


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of ``values`` that at least ``percent`` percent of them do not exceed (nearest rank).

    Args:
        values: at least one.
        percent: in (0, 100].
    """
    assert values, "a percentile needs a value"
    assert 0.0 < percent <= 100.0, "a percentile lies in (0, 100]"
    return sorted(values)[max(0, math.ceil(percent / 100.0 * len(values)) - 1)]


def latency(seconds: Sequence[float]) -> Latency:
    """The percentiles of ``seconds``, at least one."""
    return Latency(
        p50=percentile(seconds, 50), p90=percentile(seconds, 90), p99=percentile(seconds, 99), samples=len(seconds)
    )


def rate(nbytes: int, seconds: Sequence[float]) -> float:
    """GB/s (1e9 bytes a second) of ``nbytes`` in the median of ``seconds``."""
    return nbytes / statistics.median(seconds) / 1e9


def paired_ratio(ours: Sequence[float], limit: Sequence[float]) -> float:
    """How much of the limit's speed ours reached: the median over the rounds of limit time to our time.

    The two times of a round were measured one right after the other, so what slows the machine for a while hits both.
    """
    return statistics.median(other / own for own, other in zip(ours, limit, strict=True))
