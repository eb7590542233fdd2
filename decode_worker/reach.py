"""How far back a model reads: blocks that every layer's window has passed are given back while the sequence goes on.

A token of a windowed layer sees the last so many tokens, itself included (Beltagy et al., 2020). What lies wholly
before the window of the next token is read by no step any more. Full blocks go to the prefix cache, where others find
them; in the table the padding block stands for them, so a block keeps its index.
"""

from __future__ import annotations

from decode_worker.sequence import Sequence, table_owner
from engine.block_pool import BlockPool
from protocol.layout import PADDING_BLOCK


class Reach:
    """Gives back what lies out of reach.

    Args:
        pool: who holds what.
        window: the widest of the layers' windows, in tokens; 0 where a layer sees everything.
    """

    def __init__(self, pool: BlockPool, window: int) -> None:
        self._pool = pool
        self._window = window

    def let_go(self, sequence: Sequence) -> None:
        """No step is computing ``sequence``: drop its holds on blocks that its next token does not see."""
        first, last = sequence.passed, self._passed(sequence.computed)
        if last <= first:
            return
        table = sequence.block_table
        self._pool.release(table_owner(sequence.key), table[first:last])
        table[first:last] = [PADDING_BLOCK] * (last - first)
        sequence.passed = last

    def _passed(self, computed: int) -> int:
        return max(0, computed + 1 - self._window) // self._pool.block_size if self._window else 0
