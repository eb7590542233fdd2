"""The same part of several blocks: what a ship writes that does not write them whole."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import IntegrityMismatch


@dataclass(frozen=True, slots=True)
class Band:
    """Bytes ``[begin, end)`` of a block of ``block_bytes``; a range of its layers, for instance.

    Raises:
        IntegrityMismatch: it is empty or reaches outside the block; names the values.
    """

    begin: int
    end: int
    block_bytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end <= self.block_bytes:
            where = f"[{self.begin}, {self.end}) of a block of {self.block_bytes} bytes"
            raise IntegrityMismatch(f"band must be a part of a block, got {where}", field="band")

    @property
    def nbytes(self) -> int:
        """Bytes of one block's part."""
        return self.end - self.begin
