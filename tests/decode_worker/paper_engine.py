"""An engine on paper: its KV cache remembers which token was stored in which slot, and its model is arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.batch import Chunk, Draw

Model = Callable[[Sequence[int]], int]


class PaperEngine:
    """Checks that every row sees the tokens that it should, and nothing else.

    Args:
        block_size: tokens per block.
        model: the next token after some.
    """

    def __init__(self, block_size: int, model: Model) -> None:
        self.slots: dict[int, int] = {}
        self._block_size = block_size
        self._model = model

    def slot(self, block_table: Sequence[int], position: int) -> int:
        return block_table[position // self._block_size] * self._block_size + position % self._block_size

    def seen(self, block_table: Sequence[int], length: int) -> list[int]:
        return [self.slots[self.slot(block_table, position)] for position in range(length)]

    def load(self, token_ids: Sequence[int], block_table: Sequence[int]) -> None:
        """The KV of a prompt arrives; blocks that were found in the prefix cache have it already."""
        for position, token in enumerate(token_ids):
            self.slots[self.slot(block_table, position)] = token

    def execute(self, chunks: Sequence[Chunk]) -> list[Draw]:
        """Copy shared blocks, then store all rows, as a layer does, and only then look."""
        before = dict(self.slots)
        for source, target in (chunk.copied for chunk in chunks if chunk.copied is not None):
            places = (range(block * self._block_size, (block + 1) * self._block_size) for block in (source, target))
            self.slots |= {to: before[at] for at, to in zip(*places, strict=True) if at in before}
        for chunk in chunks:
            for place, token in enumerate(chunk.token_ids):
                self.slots[self.slot(chunk.block_table, chunk.start + place)] = token
        return [Draw(self._model(self.seen(chunk.block_table, chunk.start + len(chunk.token_ids)))) for chunk in chunks]
