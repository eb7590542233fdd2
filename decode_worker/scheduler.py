"""Which sequences take part in the next step, who gets room, and who must give it back. Pure bookkeeping, no I/O.

Admission is first come first served: a sequence is reserved with every block its prompt lacks, and only while each
sequence already there could still grow by a block. When the pool is full all the same, the youngest sequence is
preempted: it goes back to the router for a fresh prefill, so the oldest always gets on and nobody starves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice

import msgspec

from decode_worker.reach import Reach
from decode_worker.sequence import (
    SEQUENCES,
    Sequence,
    SequenceEvent,
    SequenceState,
    import_owner,
    table_owner,
)
from decode_worker.shared_tails import SharedTails
from decode_worker.speculator import Speculator
from engine.batch import Chunk, Draw
from engine.block_pool import BlockPool
from engine.prefix_index import block_hashes, extend, root_hash
from protocol.errors import PoolExhausted
from protocol.ids import Peer, RequestKey
from protocol.messages import Reserve
from protocol.sampling import FinishReason


@dataclass(frozen=True, slots=True)
class Output:
    """What one sequence got out of a step.

    Attributes:
        sequence: whose.
        start: index of the first token in the request's whole output.
        draws: the tokens: one, and one for each token of a draft that was right.
        finish_reason: set with the last token.
    """

    sequence: Sequence
    start: int
    draws: tuple[Draw, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Step:
    """What the next step computes, and who had to make room for it.

    Attributes:
        sequences: one token each, and their drafts.
        preempted: already dropped; their imports are still to be closed, and the router to be told.
    """

    sequences: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]


class DecodeScheduler:
    """Continuous batching over the block pool.

    Args:
        pool: holds the blocks.
        block_size: tokens per block.
        max_sequences: reserved and running side by side.
        window: tokens that the model reads back at most; 0 for all.
        speculator: drafts tokens for the steps; None where they have one row per sequence.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_sequences: int,
        window: int = 0,
        speculator: Speculator | None = None,
    ) -> None:
        self._pool = pool
        self._speculator = speculator
        self._block_size = block_size
        self._max_sequences = max_sequences
        self._arrivals = 0
        self._waiting: deque[Sequence] = deque()
        self._live: dict[RequestKey, Sequence] = {}
        self._in_step: tuple[Sequence, ...] = ()
        self._tails = SharedTails(pool)
        self._reach = Reach(pool, window)

    @property
    def waiting(self) -> int:
        """Sequences without a reservation."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the sequences without a reservation."""
        return sum(len(sequence.token_ids) for sequence in self._waiting)

    @property
    def running(self) -> int:
        """Sequences that are generating."""
        return sum(sequence.tracker.state is SequenceState.RUNNING for sequence in self._live.values())

    @property
    def empty_slots(self) -> int:
        """Slots behind the last token of each sequence, less than a block of each; those of a shared block once."""
        ends = {
            sequence.block_table[-1]: len(sequence.block_table) * self._block_size - len(sequence.token_ids)
            for sequence in self._live.values()
        }
        return sum(max(0, slots) for slots in ends.values())

    @property
    def idle(self) -> bool:
        """Whether no sequence is reserved or running."""
        return not self._live

    def find(self, key: RequestKey) -> Sequence | None:
        """The live sequence of ``key``."""
        found = self._live.get(key)
        if found is None:
            found = next((sequence for sequence in self._waiting if sequence.key == key), None)
        return found

    def asked_by(self, router: Peer) -> list[RequestKey]:
        """Live sequences of one router."""
        everything = (*self._live.values(), *self._waiting)
        return [sequence.key for sequence in everything if sequence.router == router]

    def prefill_endpoints(self) -> frozenset[str]:
        """Prefill workers that a waiting or importing sequence still needs."""
        everything = (*self._live.values(), *self._waiting)
        return frozenset(
            sequence.request.prefill.endpoint
            for sequence in everything
            if sequence.tracker.state is not SequenceState.RUNNING
        )

    @property
    def _lanes(self) -> int:
        return sum(sequence.lanes for sequence in self._live.values())

    def add(self, request: Reserve, router: Peer, now: float) -> Sequence:
        """Queue a request for a reservation."""
        sequence = Sequence(
            request=request,
            router=router,
            order=self._arrivals,
            arrived=now,
            tracker=SEQUENCES.start(str(request.key)),
            token_ids=list(request.token_ids),
            hashes=block_hashes(request.token_ids, self._block_size, request.cache_salt.encode()),
            produced=request.emitted,
            lanes=1 + len(request.forks),
        )
        self._arrivals += sequence.lanes
        self._waiting.append(sequence)
        return sequence

    def admit(self) -> list[Sequence]:
        """Reserve blocks for waiting sequences, oldest first, while they fit; those are IMPORTING now."""
        admitted = []
        while self._waiting:
            sequence = self._waiting[0]
            if self._lanes + sequence.lanes > self._max_sequences or not self._place(sequence):
                break
            self._waiting.popleft()
            self._live[sequence.key] = sequence
            sequence.tracker.move(SequenceEvent.RESERVE)
            admitted.append(sequence)
        return admitted

    def commit(self, key: RequestKey, next_token: int, now: float) -> Sequence:
        """The import of ``key`` is complete: it runs from the next step on."""
        sequence = self._live[key]
        self._pool.move_all(import_owner(key), table_owner(key))
        sequence.tracker.move(SequenceEvent.COMMIT)
        sequence.lanes = 1
        sequence.computed = len(sequence.token_ids)
        sequence.token_ids.append(next_token)
        sequence.produced += 1
        sequence.committed = now
        for index in range(sequence.cached_blocks, len(sequence.hashes)):
            self._pool.seal(sequence.block_table[index], sequence.hashes[index])
        self._reach.let_go(sequence)
        if self._speculator is not None:
            self._speculator.begin(sequence)
        return sequence

    def fork(self, first: Sequence, index: int, next_token: int) -> Sequence:
        """One more continuation of a prompt that has just committed: it shares every block of ``first``.

        Args:
            first: the sequence that came with the import.
            index: of the fork in its request.
            next_token: the fork's own first token.
        """
        fork, request = first.request.forks[index], first.request
        sequence = Sequence(
            request=msgspec.structs.replace(request, key=fork.key, sampling=fork.sampling(request.sampling), forks=()),
            router=first.router,
            order=first.order + 1 + index,
            arrived=first.arrived,
            tracker=SEQUENCES.start(str(fork.key)),
            token_ids=[*first.token_ids[: first.computed], next_token],
            hashes=list(first.hashes),
            produced=request.emitted + 1,
            computed=first.computed,
            committed=first.committed,
            block_table=list(first.block_table),
            passed=first.passed,
            cached_blocks=first.cached_blocks,
        )
        self._pool.share(table_owner(fork.key), sequence.block_table[first.passed :])
        self._live[fork.key] = sequence
        sequence.tracker.move(SequenceEvent.FORK)
        if self._speculator is not None:
            self._speculator.begin(sequence)
        return sequence

    def next_step(self) -> Step:
        """Every running sequence that has room for one more token, oldest first. One step at a time."""
        assert not self._in_step, "the last step has not been completed"
        preempted: list[Sequence] = []
        self._in_step = tuple(
            sequence
            for sequence in sorted(self._live.values(), key=lambda live: live.order)
            # Growing one sequence may preempt a later one of this very list, so the state is read when its turn comes.
            if sequence.tracker.state is SequenceState.RUNNING and self._grow(sequence, preempted)
        )
        if self._speculator is not None:
            self._speculator.draft(self._in_step, self._lanes)
        return Step(self._in_step, tuple(preempted))

    def complete_step(self, draws: Seq[Draw | None]) -> list[Output]:
        """Account for the step that :meth:`next_step` gave; ``draws`` holds one per chunk of :func:`chunks_of`."""
        outputs = []
        left = iter(draws)
        for sequence in self._in_step:
            drawn = tuple(islice(left, 1 + len(sequence.draft)))
            if sequence.tracker.state is SequenceState.LEAVING:
                self._leave(sequence)
                continue
            output = self._advance(sequence, drawn)
            outputs.append(output)
            if output.finish_reason is not None:
                sequence.tracker.move(SequenceEvent.FINISH)
                del self._live[sequence.key]
                self._pool.release_all(table_owner(sequence.key))
        assert next(left, None) is None, "more was drawn than the step had rows"
        self._end_step()
        return outputs

    def fail_step(self) -> list[Sequence]:
        """The step raised: every sequence in it leaves the scheduler. Returns those nobody had dropped."""
        failed = []
        for sequence in self._in_step:
            if sequence.tracker.state is not SequenceState.LEAVING:
                sequence.tracker.move(SequenceEvent.DROP_IN_STEP)
                failed.append(sequence)
            self._leave(sequence)
        self._end_step()
        return failed

    def drop(self, key: RequestKey) -> Sequence | None:
        """End a live sequence; its blocks go once no step writes them. Blocks of an open import stay with the import.

        Returns:
            The sequence, or None when there is none.
        """
        sequence = self.find(key)
        if sequence is None or sequence.tracker.state is SequenceState.LEAVING:
            return None
        if sequence in self._in_step:
            sequence.tracker.move(SequenceEvent.DROP_IN_STEP)
            return sequence
        if sequence.tracker.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        else:
            del self._live[key]
            self._pool.release_all(table_owner(key))
        sequence.tracker.move(SequenceEvent.DROP)
        return sequence

    def _end_step(self) -> None:
        self._in_step = ()
        self._tails.step_ended()

    def _advance(self, sequence: Sequence, drawn: Seq[Draw | None]) -> Output:
        """Take what was drawn for a sequence, up to the first token that its draft did not foresee."""
        start = sequence.produced
        kept: list[Draw] = []
        self._tails.copied(sequence)
        finish_reason: FinishReason | None = None
        for draw, foreseen in zip(drawn, (*sequence.draft, None), strict=True):
            assert draw is not None, "every row of a decode step draws a token"
            sequence.computed += 1
            self._seal_last(sequence)
            sequence.token_ids.append(draw.token_id)
            sequence.produced += 1
            kept.append(draw)
            finish_reason = sequence.request.sampling.finish_reason(draw.token_id, sequence.produced)
            if finish_reason is not None or draw.token_id != foreseen:
                break
        if self._speculator is not None:
            self._speculator.settle(sequence, accepted=len(kept) - 1)
        self._reach.let_go(sequence)
        return Output(sequence, start, tuple(kept), finish_reason)

    def _leave(self, sequence: Sequence) -> None:
        sequence.tracker.move(SequenceEvent.STEP_ENDED)
        del self._live[sequence.key]
        self._pool.release_all(table_owner(sequence.key))

    def _place(self, sequence: Sequence) -> bool:
        key = sequence.key
        hit = self._pool.match(sequence.hashes)
        self._pool.share(table_owner(key), hit)
        wanted = -(-len(sequence.token_ids) // self._block_size) - len(hit)
        # Every sequence already there, and this one, may need one more block at its next step.
        if self._live and self._pool.available < wanted + self._lanes + sequence.lanes:
            self._pool.release_all(table_owner(key))
            return False
        try:
            fresh = self._pool.allocate(import_owner(key), wanted)
        except PoolExhausted:
            self._pool.release_all(table_owner(key))
            return False
        sequence.block_table = [*hit, *fresh]
        sequence.cached_blocks = len(hit)
        return True

    def _grow(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        index = sequence.computed // self._block_size
        while True:
            if index < len(sequence.block_table) and not self._tails.shared(sequence.block_table[index]):
                return True
            try:
                (block,) = self._pool.allocate(table_owner(sequence.key), 1)
            except PoolExhausted:
                victim = max(self._live.values(), key=lambda live: live.order)
                if victim is sequence and len(self._live) == 1:
                    # Only blocks that a transport may still touch are in the way; they come free by themselves.
                    return False
                importing = victim.tracker.state is SequenceState.IMPORTING
                self.drop(victim.key)
                preempted.append(victim)
                # An import's blocks come free only once its window is quiet: wait for them, rather than take more.
                if importing or victim is sequence:
                    return False
            else:
                self._tails.put(sequence, index, block)
                return True

    def _seal_last(self, sequence: Sequence) -> None:
        if sequence.computed % self._block_size:
            return
        index = sequence.computed // self._block_size - 1
        parent = sequence.hashes[-1] if sequence.hashes else root_hash(sequence.request.cache_salt.encode())
        stop = sequence.computed
        sequence.hashes.append(extend(parent, sequence.token_ids[stop - self._block_size : stop]))
        self._pool.seal(sequence.block_table[index], sequence.hashes[index])


def chunks_of(sequences: Seq[Sequence]) -> list[Chunk]:
    """The engine's view of a step: the last token of each sequence, then each of its draft's, as if it had come.

    One chunk per token, over the same blocks: attention computes each as a decode, just as in a step of its own.
    """
    return [
        Chunk(
            token_ids=(token,),
            start=sequence.computed + ahead,
            block_table=sequence.block_table,
            sampling=sequence.request.sampling,
            position=sequence.produced + ahead,
            history=_history(sequence, ahead),
            copied=None if ahead else sequence.copied,
        )
        for sequence in sequences
        for ahead, token in enumerate((sequence.token_ids[-1], *sequence.draft))
    ]


def _history(sequence: Sequence, ahead: int) -> Seq[int]:
    """The tokens before the draw of a sequence's row, ``ahead`` of its draft among them, where it looks back."""
    if not sequence.request.sampling.looks_back:
        return ()
    return [*sequence.token_ids, *sequence.draft[:ahead]] if ahead else sequence.token_ids
