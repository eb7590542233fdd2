"""A worker's network interface: one transfer after the other, at its bandwidth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Link:
    """One interface.

    Attributes:
        bytes_per_second: of it.
        free_at: when it has done all that it was given so far.
        nbytes, seconds: that it has carried, and for how long.
    """

    bytes_per_second: float
    free_at: float = 0.0
    nbytes: int = 0
    seconds: float = 0.0

    def takes(self, other: Link, nbytes: int) -> float:
        """Seconds that bytes take to ``other``, whatever is before them."""
        return nbytes / min(self.bytes_per_second, other.bytes_per_second)

    def carry(self, other: Link, nbytes: int, ready: float) -> float:
        """Carry bytes to ``other``, that are ready from then on; returns when the last has come.

        Both are busy from when either was free for as long as the slower takes.
        """
        took = self.takes(other, nbytes)
        end = max(ready, self.free_at, other.free_at) + took
        for each in (self, other):
            each.free_at = end
            each.nbytes += nbytes
            each.seconds += took
        return end
