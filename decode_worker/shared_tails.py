"""The last, partial blocks that forks of one prompt share, each until it writes: then it gets a copy, or is the last.

Life cycle of a copy: :meth:`SharedTails.put` when a step is made up, done by the engine before that step computes
anything, over when the step has ended. Until then the sequence holds both blocks, so nobody is given the one that is
read; and of the sequences that share a block, the one that all others copy from writes it in place.
"""

from __future__ import annotations

from collections import Counter

from decode_worker.sequence import Sequence, table_owner
from engine.block_pool import BlockPool


class SharedTails:
    """Copies of one step.

    Args:
        pool: who holds what.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._read: Counter[int] = Counter()

    def shared(self, block: int) -> bool:
        """Whether somebody else still needs ``block`` as it is once this step's copies are made."""
        return self._pool.holders(block) - self._read[block] > 1

    def put(self, sequence: Sequence, index: int, block: int) -> None:
        """``block`` is the sequence's block ``index`` from now on: a further one, or a copy of the one there."""
        if index == len(sequence.block_table):
            sequence.block_table.append(block)
            return
        source = sequence.block_table[index]
        sequence.copied = (source, block)
        sequence.block_table[index] = block
        self._read[source] += 1

    def copied(self, sequence: Sequence) -> None:
        """The step of ``sequence`` has ended well: it lets go of what it copied from."""
        if sequence.copied is not None:
            self._pool.release(table_owner(sequence.key), (sequence.copied[0],))
            sequence.copied = None

    def step_ended(self) -> None:
        """No copy is under way any more."""
        self._read.clear()
