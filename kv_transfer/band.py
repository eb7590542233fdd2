"""The same part of several blocks: what a ship writes that does not write them whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.span import Span
from protocol.errors import IntegrityMismatch
from protocol.layout import KVLayout


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

    @classmethod
    def of_layers(cls, layout: KVLayout, layers: range) -> Band:
        """The band that a range of layers is.

        Raises:
            ConfigError: the layout has not these layers.
        """
        begin, nbytes = layout.block_span(0, layers=layers)
        return cls(begin, begin + nbytes, layout.block_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of one block's part."""
        return self.end - self.begin

    def spans(self, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> list[Span]:
        """What copies this band of ``source_blocks[i]`` onto that of ``target_blocks[i]``, one span for each ``i``.

        Raises:
            IntegrityMismatch: the lists differ in length, or name a negative id.
        """
        if len(source_blocks) != len(target_blocks):
            raise IntegrityMismatch(f"{len(source_blocks)} source blocks for {len(target_blocks)} target blocks")
        size, begin, nbytes = self.block_bytes, self.begin, self.nbytes
        pairs = zip(source_blocks, target_blocks, strict=True)
        return [Span(origin * size + begin, to * size + begin, nbytes) for origin, to in pairs]
