"""Adds drafts to a step and takes away what was wrong with them.

A draft's tokens are rows of the step like the sequence's own one: each is stored in the slot that would be its own, and
sees what stands before it. Each row draws as it would in a step of its own, with the noise of its position, and the
draft is followed while it is what was drawn. So text, log-probabilities and penalties are those of plain decoding,
greedy or sampled. It is what rejection sampling (Leviathan et al., 2023) comes to where a draft has no chance in it: a
token x of it is accepted as often as the model draws x, and in its place comes what the model draws else.

K and V of wrong tokens lie behind the sequence's end, where nobody reads, and are overwritten or given back.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from decode_worker.drafter import Drafter
from decode_worker.sequence import Sequence, table_owner
from decode_worker.speculation import Speculation
from engine.block_pool import BlockPool


class Speculator:
    """The drafts of all sequences of one worker.

    Args:
        settings: how drafts are made.
        pool: holds the blocks.
        block_size: tokens per block.
        max_rows: of a step; drafts take what its sequences leave.

    Attributes:
        drafted: tokens so far.
        accepted: of them.
    """

    def __init__(self, settings: Speculation, pool: BlockPool, *, block_size: int, max_rows: int) -> None:
        self.drafted = self.accepted = 0
        self._settings = settings
        self._pool = pool
        self._block_size = block_size
        self._max_rows = max_rows

    def begin(self, sequence: Sequence) -> None:
        """``sequence`` runs from now on."""
        sequence.drafter = Drafter(self._settings, sequence.token_ids)

    def draft(self, stepping: Seq[Sequence], live: int) -> None:
        """Give sequences of the next step drafts, oldest first.

        Args:
            stepping: the sequences; each has room for its own token.
            live: sequences that may yet want a block each; a draft takes none of these.
        """
        spare = self._max_rows - len(stepping)
        for sequence in stepping:
            if spare <= 0:
                return
            sequence.draft = self._draft(sequence, spare, live)
            spare -= len(sequence.draft)

    def settle(self, sequence: Sequence, accepted: int) -> None:
        """The step of ``sequence`` is accounted for; ``accepted`` tokens of its draft were right."""
        drafted = len(sequence.draft)
        if not drafted:
            return
        assert sequence.drafter is not None
        sequence.drafter.judge(drafted, accepted)
        self.drafted += drafted
        self.accepted += accepted
        sequence.draft = ()
        needed = -(-sequence.computed // self._block_size)
        self._pool.release(table_owner(sequence.key), sequence.block_table[needed:])
        del sequence.block_table[needed:]

    def _draft(self, sequence: Sequence, spare: int, live: int) -> tuple[int, ...]:
        assert sequence.drafter is not None, "it has begun to run"
        sampling = sequence.request.sampling
        # The row of the last draft token draws one token more.
        most = min(spare, sampling.max_tokens - sequence.produced - 1)
        draft = sequence.drafter.propose(sequence.token_ids, most)
        # What comes after a stop token is not wanted; the stop token itself is drawn by the row before it.
        stop = next((place for place, token in enumerate(draft) if token in sampling.stop_token_ids), len(draft))
        return draft[: min(stop, self._room(sequence, stop, live))] if stop else ()

    def _room(self, sequence: Sequence, wanted: int, live: int) -> int:
        """How many of ``wanted`` draft tokens have a slot, after taking blocks that nobody else is waiting for."""
        size = self._block_size
        lacking = -(-(sequence.computed + 1 + wanted) // size) - len(sequence.block_table)
        if lacking > 0 and self._pool.available - lacking >= live:
            sequence.block_table += self._pool.allocate(table_owner(sequence.key), lacking)
        return len(sequence.block_table) * size - sequence.computed - 1
