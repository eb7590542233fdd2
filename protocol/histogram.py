"""Histograms that travel in heartbeats: how many values fell into each bucket since the incarnation began.

Life cycle: :class:`Observations` is filled where things happen; :class:`Histogram` is what it held at one moment, for
the wire and for sums over several incarnations. Both ends know the bounds, so only the counts travel: to change the
bounds of a scale is to change the wire.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated

import msgspec

MAX_BUCKETS = 64

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Total = Annotated[float, msgspec.Meta(ge=0.0)]


@dataclass(frozen=True, slots=True)
class Scale:
    """The buckets of one kind of value.

    Attributes:
        unit: of the values.
        bounds: upper bounds, each inclusive, ascending; one bucket more takes what is above the last.
    """

    unit: str
    bounds: tuple[float, ...]


SECONDS = Scale(
    "seconds",
    (
        *(25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
        *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0),
    ),
)
"""From less than the shortest way of one block to more than a lease lives."""
BYTES = Scale("bytes", tuple(float(4**power << 10) for power in range(1, 12)))
"""From 4 KiB to 4 GiB."""
SPANS = Scale("spans", tuple(float(1 << power) for power in range(13)))
"""From one run of adjacent blocks to 4,096."""
BYTES_PER_SECOND = Scale(
    "bytes_per_second", tuple(digit * 10.0**power for power in range(6, 12) for digit in (1.0, 2.0, 5.0))
)
"""From 1 MB/s to 500 GB/s."""


class Histogram(msgspec.Struct, frozen=True, array_like=True):
    """Values by bucket.

    Attributes:
        counts: of each bucket alone, the one above the last bound included; empty while nothing was observed.
        total: sum of all values.
    """

    counts: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=MAX_BUCKETS)] = ()
    total: _Total = 0.0

    @property
    def count(self) -> int:
        """How many values there are."""
        return sum(self.counts)

    def fits(self, scale: Scale) -> bool:
        """Whether it can be one of ``scale``."""
        return len(self.counts) in (0, len(scale.bounds) + 1)

    def plus(self, other: Histogram) -> Histogram:
        """The values of both; they must be of one scale."""
        counts = zip_longest(self.counts, other.counts, fillvalue=0)
        return Histogram(tuple(mine + theirs for mine, theirs in counts), self.total + other.total)


class Observations:
    """A histogram that is being filled.

    Args:
        scale: its buckets.
    """

    def __init__(self, scale: Scale) -> None:
        self._bounds = scale.bounds
        self._counts = [0] * (len(scale.bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Take in one value, at least 0."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def histogram(self) -> Histogram:
        """What there is so far."""
        return Histogram(tuple(self._counts), self._total)
