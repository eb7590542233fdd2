"""Which sequences take part in the next step, who gets room, and who must give it back. Pure bookkeeping, no I/O.

The senior goes first: who waits longest, each one's priority included (:mod:`router.priority`). A sequence is reserved
with every block its prompt lacks, and only while each sequence already there could still grow by a block. When the pool
is full all the same, the junior makes room: it is swapped out to host memory and comes back in its turn, or it goes
back to the router for a fresh prefill. So the senior always gets on, and as everybody becomes it, nobody starves.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import islice
from operator import attrgetter

from decode_worker.placing import place
from decode_worker.prompts import Computed, Prompts
from decode_worker.reach import Reach
from decode_worker.sequence import (
    SEQUENCES,
    Sequence,
    SequenceEvent,
    SequenceState,
    forked,
    import_owner,
    seal_last,
    table_owner,
)
from decode_worker.shared_tails import SharedTails
from decode_worker.speculator import Speculator
from decode_worker.step import Output, Step
from decode_worker.swap_book import SwapBook
from engine.batch import Draw
from engine.block_pool import BlockPool
from engine.prefix_index import block_hashes
from engine.prompt import Prompt
from protocol.errors import PoolExhausted
from protocol.ids import Peer, RequestKey
from protocol.messages import Prefill, Reserve
from protocol.sampling import FinishReason


class DecodeScheduler:
    """Continuous batching over the block pool.

    Args:
        pool: holds the blocks.
        block_size: tokens per block.
        max_sequences: reserved and running side by side.
        swaps: host memory for sequences that make room; by default there is none.
        prefers_swap: whether a sequence is better swapped out than prefilled anew.
        window: tokens that the model reads back at most; 0 for all.
        speculator: drafts tokens for the steps; None where they have one row per sequence.
        step_tokens: tokens at most of a step that also computes prompts.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_sequences: int,
        swaps: SwapBook | None = None,
        prefers_swap: Callable[[Sequence], bool] = lambda sequence: True,
        window: int = 0,
        speculator: Speculator | None = None,
        step_tokens: int = 512,
    ) -> None:
        self._pool = pool
        self._swaps = SwapBook(0) if swaps is None else swaps
        self._prefers_swap = prefers_swap
        self._speculator = speculator
        self._block_size = block_size
        self._max_sequences = max_sequences
        self._arrivals = 0
        self._waiting: list[Sequence] = []
        self._live: dict[RequestKey, Sequence] = {}
        self._prompts = Prompts(pool, step_tokens)
        self._in_step: tuple[Sequence, ...] = ()
        self._tails = SharedTails(pool)
        self._reach = Reach(pool, window)

    @property
    def waiting(self) -> int:
        """Sequences that wait for room: without a reservation, or swapped out."""
        return len(self._waiting) + len(self._swaps.waiting)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the sequences without a reservation, and those yet to be computed here."""
        here = (live for live in self._live.values() if live.tracker.state is SequenceState.PREFILLING)
        return sum(len(sequence.token_ids) - sequence.computed for sequence in (*here, *self._waiting))

    @property
    def running(self) -> int:
        """Sequences that are generating, or whose prompts are being computed."""
        stepping = (SequenceState.RUNNING, SequenceState.PREFILLING)
        return sum(sequence.tracker.state in stepping for sequence in self._live.values())

    @property
    def empty_slots(self) -> int:
        """Slots behind the last token of each sequence, less than a block of each; those of a shared block once."""
        ends = {}
        for sequence in self._live.values():
            filled = len(sequence.token_ids) + len(sequence.draft)
            ends[sequence.block_table[-1]] = len(sequence.block_table) * self._block_size - filled
        return sum(max(0, slots) for slots in ends.values())

    @property
    def idle(self) -> bool:
        """Whether no sequence is reserved, running or swapped out."""
        return not self._live and not self._swaps.waiting

    def find(self, key: RequestKey) -> Sequence | None:
        """The live sequence of ``key``."""
        return self._live.get(key) or next((each for each in self._everything if each.key == key), None)

    def keys(self) -> set[RequestKey]:
        """Of every live sequence."""
        return {sequence.key for sequence in self._everything}

    def asked_by(self, router: Peer) -> list[RequestKey]:
        """Live sequences of one router."""
        return [sequence.key for sequence in self._everything if sequence.router == router]

    def prefill_endpoints(self) -> frozenset[str]:
        """Prefill workers that a waiting or importing sequence still needs."""
        in_need = (SequenceState.WAITING, SequenceState.IMPORTING)
        wanted = (each.prefill for each in self._everything if each.tracker.state in in_need)
        return frozenset(prefill.endpoint for prefill in wanted if prefill is not None)

    @property
    def _everything(self) -> tuple[Sequence, ...]:
        return (*self._live.values(), *self._swaps.waiting, *self._waiting)

    @property
    def _lanes(self) -> int:
        return sum(sequence.lanes for sequence in self._live.values())

    def add(self, request: Reserve | Prefill, router: Peer, now: float) -> Sequence:
        """Queue a request for its blocks, behind those that are its seniors or its equals."""
        sequence = Sequence(
            request=request,
            router=router,
            order=(now - request.seniority, self._arrivals),
            arrived=now,
            tracker=SEQUENCES.start(str(request.key)),
            token_ids=list(request.token_ids),
            hashes=block_hashes(request.token_ids, self._block_size, request.cache_salt.encode()),
            produced=request.emitted,
            lanes=1 + len(request.forks),
            prompt=Prompt.of(request, router, now) if isinstance(request, Prefill) else None,
        )
        self._arrivals += sequence.lanes
        insort(self._waiting, sequence, key=attrgetter("order"))
        return sequence

    def admit(self) -> list[Sequence]:
        """Give blocks to who waits for them, the senior first, while they fit.

        Returns:
            Those that are IMPORTING or PREFILLING now, or SWAPPING_IN: with slots that are still to be copied.
        """
        admitted = []
        while True:
            sequence = min((*self._waiting[:1], *self._swaps.senior()), key=attrgetter("order"), default=None)
            if sequence is None or (lanes := self._lanes + sequence.lanes) > self._max_sequences:
                break
            # Every sequence already there, and this one, may need one more block at its next step.
            if not place(sequence, self._pool, lanes if self._live else 0):
                break
            self._live[sequence.key] = sequence
            if sequence.tracker.state is SequenceState.SWAPPED:
                self._swaps.called_back(sequence)
                sequence.tracker.move(SequenceEvent.SWAP_IN)
            else:
                self._waiting.pop(0)
                sequence.tracker.move(SequenceEvent.PREFILL if sequence.prompt else SequenceEvent.RESERVE)
            admitted.append(sequence)
        return admitted

    def commit(self, key: RequestKey, next_token: int, now: float) -> Sequence:
        """The import of ``key`` is complete: it runs from the next step on."""
        sequence = self._live[key]
        self._pool.move_all(import_owner(key), table_owner(key))
        for index in range(sequence.cached_blocks, len(sequence.hashes)):
            self._pool.seal(sequence.block_table[index], sequence.hashes[index])
        self.begin(sequence, next_token, now, SequenceEvent.COMMIT)
        return sequence

    def begin(
        self, sequence: Sequence, next_token: int, now: float, event: SequenceEvent = SequenceEvent.BEGIN
    ) -> None:
        """The KV of its prompt is there, computed here by default: ``sequence`` runs from the next step on."""
        sequence.tracker.move(event)
        sequence.prompt = None
        sequence.lanes = 1
        sequence.computed = len(sequence.token_ids)
        sequence.token_ids.append(next_token)
        sequence.produced += 1
        sequence.committed = now
        self._reach.let_go(sequence)
        if self._speculator is not None:
            self._speculator.begin(sequence)

    def fork(self, first: Sequence, index: int, next_token: int) -> Sequence:
        """One more continuation of a prompt that has just committed: it shares every block of ``first``.

        Args:
            first: the sequence that came with the import.
            index: of the fork in its request.
            next_token: the fork's own first token.
        """
        sequence = self._live[first.request.forks[index].key] = forked(first, index, next_token)
        self._pool.share(table_owner(sequence.key), sequence.block_table[first.passed :])
        sequence.tracker.move(SequenceEvent.FORK)
        if self._speculator is not None:
            self._speculator.begin(sequence)
        return sequence

    def next_step(self) -> Step:
        """Every running sequence that has room for one more token, the senior first, then prompts. One at a time."""
        assert not self._in_step, "the last step has not been completed"
        preempted: list[Sequence] = []
        swapped_out: list[Sequence] = []
        self._in_step = tuple(
            sequence
            for sequence in sorted(self._live.values(), key=lambda live: live.order)
            # Growing one sequence may preempt a later one of this very list, so the state is read when its turn comes.
            if sequence.tracker.state is SequenceState.RUNNING and self._grow(sequence, preempted, swapped_out)
        )
        if self._speculator is not None:
            self._speculator.draft(self._in_step, self._lanes)
        rows = sum(1 + len(sequence.draft) for sequence in self._in_step)
        self._in_step += self._prompts.share(self._live.values(), rows)
        return Step(self._in_step, tuple(preempted), tuple(swapped_out))

    def complete_step(self, draws: Seq[Draw | None]) -> list[Output]:
        """Account for the step that :meth:`next_step` gave; ``draws`` holds one per chunk of :func:`chunks_of`."""
        outputs = []
        left = iter(draws)
        for sequence in self._in_step:
            drawn = tuple(islice(left, 1 + len(sequence.draft)))
            if sequence.tracker.state is SequenceState.LEAVING:
                self._leave(sequence)
                continue
            if sequence.work is not None:
                self._prompts.complete(sequence, drawn[0])
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

    def take_computed(self) -> Seq[Computed]:
        """What the last step has done for prompts. Those that have their first token :meth:`begin`, or are dropped."""
        return self._prompts.take()

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

    def copied(self, sequence: Sequence, now: float) -> None:
        """The copy of a sequence to its slots, or from them, has ended well."""
        state = sequence.tracker.state
        if state is SequenceState.LEAVING:
            self._leave(sequence, SequenceEvent.COPY_ENDED)
            return
        sequence.tracker.move(SequenceEvent.COPIED)
        if state is SequenceState.SWAPPING_OUT:
            del self._live[sequence.key]
            self._pool.release_all(table_owner(sequence.key))
            sequence.block_table = []
            sequence.swapped = now
            self._swaps.went_out(sequence)
            return
        self._swaps.give_back(sequence.key)
        sequence.slots = []
        for index in range(sequence.cached_blocks, len(sequence.hashes)):
            self._pool.seal(sequence.block_table[index], sequence.hashes[index])

    def copy_failed(self, sequence: Sequence) -> bool:
        """The copy of a sequence failed, and with it the sequence; whether nobody had dropped it."""
        dropped = sequence.tracker.state is SequenceState.LEAVING
        if not dropped:
            sequence.tracker.move(SequenceEvent.DROP_IN_COPY)
        self._leave(sequence, SequenceEvent.COPY_ENDED)
        return not dropped

    def give_up(self, before: float) -> list[Sequence]:
        """Drop the sequences that have been swapped out since before then; the router is still to be told."""
        return [sequence for sequence in self._swaps.overdue(before) if self.drop(sequence.key)]

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
        if sequence.copying:
            sequence.tracker.move(SequenceEvent.DROP_IN_COPY)
            return sequence
        if sequence.tracker.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        elif sequence.tracker.state is SequenceState.SWAPPED:
            self._swaps.called_back(sequence)
            self._swaps.give_back(key)
        else:
            del self._live[key]
            self._pool.release_all(table_owner(key))
        sequence.tracker.move(SequenceEvent.DROP)
        return sequence

    def _end_step(self) -> None:
        for sequence in self._in_step:
            sequence.work = None
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
            seal_last(sequence, self._pool)
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

    def _leave(self, sequence: Sequence, event: SequenceEvent = SequenceEvent.STEP_ENDED) -> None:
        sequence.tracker.move(event)
        del self._live[sequence.key]
        self._pool.release_all(table_owner(sequence.key))
        self._swaps.give_back(sequence.key)

    def _grow(self, sequence: Sequence, preempted: list[Sequence], swapped_out: list[Sequence]) -> bool:
        index = sequence.computed // self._block_size
        while True:
            if index < len(sequence.block_table) and not self._tails.shared(sequence.block_table[index]):
                return True
            try:
                (block,) = self._pool.allocate(table_owner(sequence.key), 1)
            except PoolExhausted:
                victim = max(self._live.values(), key=attrgetter("order"))
                if victim is sequence and len(self._live) == 1:
                    # Only blocks that a transport may still touch are in the way; they come free by themselves.
                    return False
                if any(live.copying for live in self._live.values()):
                    # A copy is soon over, and then there is room, or somebody else to make it.
                    return False
                state = victim.tracker.state
                if state is SequenceState.RUNNING and self._swap_out(victim):
                    swapped_out.append(victim)
                    return False
                self.drop(victim.key)
                preempted.append(victim)
                # An import's blocks come free only once its window is quiet: wait for them, rather than take more.
                if state is SequenceState.IMPORTING or victim is sequence:
                    return False
            else:
                self._tails.put(sequence, index, block)
                return True

    def _swap_out(self, victim: Sequence) -> bool:
        slots = -(-victim.computed // self._block_size) - victim.passed
        if not self._swaps.fits(slots) or not self._prefers_swap(victim):
            return False
        victim.tracker.move(SequenceEvent.SWAP_OUT)
        victim.slots = self._swaps.take(victim.key, slots)
        return True
