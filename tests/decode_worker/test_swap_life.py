"""Random lives of sequences that make room for each other, with the memory played: nobody loses or shares its KV."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from swap_stage import BLOCK, STOP, Stage

from decode_worker.sequence import Sequence, SequenceState, import_owner, quarantine_owner
from engine.batch import Draw
from protocol.ids import RequestKey


class SwapLife(RuleBasedStateMachine):
    """Sequences of any priority come, are dropped anywhere, make room and come back; the memory is played, too.

    Copies and steps read and write when they end, which is the worst case: a block that was given to somebody else
    too early would show in what a sequence reads at its next step.
    """

    @initialize(blocks=st.integers(9, 14), slots=st.integers(2, 24), crowd=st.integers(2, 6), steps=st.integers(0, 20))
    def begin(self, blocks: int, slots: int, crowd: int, steps: int) -> None:
        self.stage = Stage(blocks, slots, sequences=6)
        self.subject, self.pool, self.book = self.stage.subject, self.stage.pool, self.stage.book
        self.memory: dict[tuple[int, int], int] = {}
        self.host: dict[tuple[int, int], int] = {}
        self.names = 0
        self.live: dict[RequestKey, Sequence] = {}
        self.quarantined: set[RequestKey] = set()
        self.copies: list[tuple[bool, Sequence, tuple[int, ...], tuple[int, ...]]] = []
        self.writes: list[tuple[int, int, int]] = []
        self.stepping: list[Sequence] = []
        self.swapped = 0
        self.crowd(crowd, 0)
        self.run(steps)

    def end_import(self, key: RequestKey) -> None:
        if self.pool.holdings(import_owner(key)):
            self.pool.move_all(import_owner(key), quarantine_owner(key))
            self.quarantined.add(key)

    def copy(self, sequence: Sequence, *, out: bool) -> None:
        first = 0 if out else sequence.cached_blocks
        blocks = tuple(sequence.block_table[first : len(sequence.slots)])
        self.copies.append((out, sequence, blocks, tuple(sequence.slots[first:])))

    def importing(self) -> list[RequestKey]:
        return sorted(k for k, s in self.live.items() if s.tracker.state is SequenceState.IMPORTING)

    @rule(length=st.integers(1, 9), family=st.integers(0, 2), max_tokens=st.integers(2, 23), senior=st.integers(-3, 3))
    def add(self, length: int, family: int, max_tokens: int, senior: int) -> None:
        self.names += 1
        tokens = tuple(range(family, family + length))
        added = self.stage.add(f"r{self.names:04}", tokens, seniority=float(senior), max_tokens=max_tokens)
        self.live[added.key] = added

    @precondition(lambda self: len(self.live) < 12)
    @rule(count=st.integers(2, 5), senior=st.integers(-3, 3))
    def crowd(self, count: int, senior: int) -> None:
        """Several that begin small and grow: what fills a pool beyond what admission foresees."""
        for family in range(count):
            self.add(length=2 + family, family=10 * self.names, max_tokens=23, senior=senior)

    @rule(swaps=st.booleans(), later=st.floats(0.0, 2.0))
    def time_passes(self, swaps: bool, later: float) -> None:
        self.stage.swaps = swaps
        self.stage.now += later

    @rule()
    def admit(self) -> None:
        for sequence in self.subject.admit():
            if sequence.tracker.state is SequenceState.SWAPPING_IN:
                self.copy(sequence, out=False)

    @precondition(lambda self: self.importing())
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.commit_one(data.draw(st.sampled_from(self.importing())))

    def commit_one(self, key: RequestKey) -> None:
        sequence = self.live[key]
        for index, token in enumerate(sequence.token_ids):
            if index >= sequence.cached_blocks * BLOCK:
                self.memory[sequence.block_table[index // BLOCK], index % BLOCK] = token
        self.subject.commit(key, 7, self.stage.now)

    @precondition(lambda self: not self.stepping)
    @rule()
    def begin_step(self) -> None:
        everyone = [live for live in self.live.values() if live.block_table]
        senior = min(everyone, key=lambda live: live.order, default=None)
        step = self.subject.next_step()
        for sequence in step.preempted:
            del self.live[sequence.key]
            self.end_import(sequence.key)
        for sequence in step.swapped_out:
            self.swapped += 1
            self.copy(sequence, out=True)
        evicted = (*step.preempted, *step.swapped_out)
        assert senior not in evicted or len(everyone) == 1, "the senior makes room for nobody"
        self.stepping = list(step.sequences)
        for sequence in self.stepping:
            read = [self.memory[sequence.block_table[i // BLOCK], i % BLOCK] for i in range(sequence.computed)]
            assert read == sequence.token_ids[: sequence.computed], "its KV is not its own"
            at = sequence.computed
            self.writes.append((sequence.block_table[at // BLOCK], at % BLOCK, sequence.token_ids[at]))

    @precondition(lambda self: self.stepping)
    @rule(token=st.sampled_from([3, 4, STOP]), fails=st.booleans())
    def end_step(self, token: int, fails: bool) -> None:
        for block, offset, written in self.writes:
            self.memory[block, offset] = written
        count, self.stepping, self.writes = len(self.stepping), [], []
        if fails:
            for sequence in self.subject.fail_step():
                del self.live[sequence.key]
            return
        for output in self.subject.complete_step([Draw(token)] * count):
            if output.finish_reason is not None:
                del self.live[output.sequence.key]

    @precondition(lambda self: not self.stepping)
    @rule(steps=st.integers(1, 12))
    def run(self, steps: int) -> None:
        """Nothing happens for some steps, so that sequences grow until the pool is full."""
        for _ in range(steps):
            self.admit()
            for key in self.importing():
                self.commit_one(key)
            self.begin_step()
            if self.stepping:
                self.end_step(token=3, fails=False)

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), fails=st.integers(0, 9))
    def end_copy(self, data: st.DataObject, fails: int) -> None:
        self.end_one_copy(data.draw(st.integers(0, len(self.copies) - 1)), fails=fails == 0)

    def end_one_copy(self, which: int, *, fails: bool = False) -> None:
        out, sequence, blocks, slots = self.copies.pop(which)
        for block, slot in zip(blocks, slots, strict=True):
            for offset in range(BLOCK):
                source, target = (self.memory, self.host) if out else (self.host, self.memory)
                place, row = (slot, block) if out else (block, slot)
                target[place, offset] = source.get((row, offset), -1)
        if not fails:
            self.subject.copied(sequence, self.stage.now)
        elif self.subject.copy_failed(sequence):
            del self.live[sequence.key]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.live)))
        assert self.subject.drop(key) is self.live.pop(key)
        self.end_import(key)

    @rule(patience=st.floats(0.0, 3.0))
    def give_up(self, patience: float) -> None:
        for sequence in self.subject.give_up(self.stage.now - patience):
            del self.live[sequence.key]

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def quiesce(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.quarantined)))
        self.quarantined.discard(key)
        self.pool.release_all(quarantine_owner(key))

    @invariant()
    def balances(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        self.book.slots.check_integrity()
        moving = [sequence for _, sequence, _, _ in self.copies]
        holders = {sequence.key: sequence for sequence in (*self.live.values(), *moving) if sequence.slots}
        assert self.book.used == sum(len(sequence.slots) for sequence in holders.values())
        assert not any(live.block_table for live in self.book.waiting), "who is out holds no block"

    def teardown(self) -> None:
        """Whatever happened, everything drains by itself."""
        if not hasattr(self, "pool"):
            return
        if self.stepping:
            self.end_step(token=3, fails=False)
        for _ in range(2000):
            for key in list(self.quarantined):
                self.quarantined.discard(key)
                self.pool.release_all(quarantine_owner(key))
            while self.copies:
                self.end_one_copy(0)
            self.admit()
            for key in self.importing():
                self.commit_one(key)
            self.begin_step()
            if self.stepping:
                self.end_step(token=3, fails=False)
            if not self.live and not self.copies and not self.quarantined:
                break
        assert not self.live, "a sequence never ended"
        counts = self.pool.counts()
        assert counts.free + counts.cached + counts.reserved == counts.total
        assert self.book.used == 0


TestSwapLife = SwapLife.TestCase
TestSwapLife.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
