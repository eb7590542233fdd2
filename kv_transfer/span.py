"""A run of bytes to be moved from one pool to another."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import IntegrityMismatch

MAX_OFFSET = 1 << 62
"""Offsets and lengths lie below this, so that sums of two fit 64 bits."""


@dataclass(frozen=True, slots=True)
class Span:
    """``nbytes`` bytes at ``source`` of the sender's pool belong at ``target`` of the receiver's.

    Attributes:
        source: byte offset in the pool that is read.
        target: byte offset in the pool that is written.
        nbytes: length, at least 1.

    Raises:
        IntegrityMismatch: a value is out of bounds; names the field and the value.
    """

    source: int
    target: int
    nbytes: int

    def __post_init__(self) -> None:
        if 0 <= self.source < MAX_OFFSET and 0 <= self.target < MAX_OFFSET and 1 <= self.nbytes < MAX_OFFSET:
            return
        for name, low in (("source", 0), ("target", 0), ("nbytes", 1)):
            value = getattr(self, name)
            if not low <= value < MAX_OFFSET:
                raise IntegrityMismatch(f"{name} must lie in [{low}, 2**62), got {value}", field=name)
