"""The decode scheduler with host memory beside its pool: who makes room, who comes back, and whose memory it is."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import Sequence, SequenceState, import_owner, quarantine_owner
from decode_worker.swap_book import SwapBook
from engine.batch import Draw
from engine.block_pool import BlockPool
from protocol.ids import Peer, RequestKey
from protocol.messages import PrefillAddress, Reserve
from protocol.sampling import SamplingParams

ROUTER = Peer("router-0", 1)
PREFILL = PrefillAddress(peer=Peer("prefill-0", 1), endpoint="tcp://127.0.0.1:1")
BLOCK = 4
STOP = 9


@dataclass
class Stage:
    """A scheduler, and everything it works on."""

    num_blocks: int = 9
    slots: int = 9
    sequences: int = 8
    swaps: bool = True
    now: float = 0.0
    pool: BlockPool = field(init=False)
    book: SwapBook = field(init=False)
    subject: DecodeScheduler = field(init=False)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, BLOCK)
        self.book = SwapBook(self.slots)
        self.subject = DecodeScheduler(
            self.pool,
            block_size=BLOCK,
            max_sequences=self.sequences,
            swaps=self.book,
            prefers_swap=lambda sequence: self.swaps,
        )

    def add(self, name: str, tokens: tuple[int, ...], *, seniority: float = 0.0, max_tokens: int = 20) -> Sequence:
        request = Reserve(
            key=RequestKey(name, 0),
            token_ids=tokens,
            sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,)),
            prefill=PREFILL,
            seniority=seniority,
        )
        return self.subject.add(request, ROUTER, self.now)

    def running(self, name: str, length: int, *, first: int = 100, **options: float) -> Sequence:
        self.add(name, tuple(range(first, first + length)), **options)  # type: ignore[arg-type]
        (sequence,) = self.subject.admit()
        return self.subject.commit(sequence.key, 7, self.now)

    def step(self) -> list[Sequence]:
        """One step; returns who is swapped out by it."""
        step = self.subject.next_step()
        assert step.preempted == ()
        self.subject.complete_step([Draw(3)] * len(step.sequences))
        return list(step.swapped_out)

    def until_swapped(self) -> Sequence:
        while not (victims := self.step()):
            pass
        (victim,) = victims
        return victim

    def two(self) -> tuple[Sequence, Sequence]:
        """Two sequences that fill the pool, and the junior on its way out."""
        old, young = self.running("old", 8), self.running("young", 8, first=200)
        assert self.until_swapped() is young
        return old, young


def test_the_junior_goes_out_and_comes_back_as_it_was() -> None:
    stage = Stage()
    old, young = stage.two()
    assert young.tracker.state is SequenceState.SWAPPING_OUT
    assert len(young.slots) == stage.book.used == 4
    tokens, table, computed = list(young.token_ids), list(young.block_table), young.computed
    # Until it is copied its blocks are its own, and whoever wants one waits; nobody else is sent out meanwhile.
    assert stage.subject.next_step().sequences == ()
    assert [stage.pool.state(block).name for block in table] == ["ACTIVE"] * 4
    stage.subject.copied(young, 1.0)
    assert (young.tracker.state, stage.subject.waiting, stage.subject.idle) == (SequenceState.SWAPPED, 1, False)
    assert stage.subject.find(young.key) is young
    assert stage.subject.asked_by(ROUTER) == [old.key, young.key]
    assert stage.subject.next_step().sequences == (old,)
    assert stage.subject.admit() == []
    stage.subject.complete_step([Draw(STOP)])
    assert stage.subject.admit() == [young]
    assert young.tracker.state is SequenceState.SWAPPING_IN
    assert stage.subject.next_step().sequences == ()
    stage.subject.copied(young, 2.0)
    assert (young.tracker.state, young.token_ids, young.computed) == (SequenceState.RUNNING, tokens, computed)
    assert (len(young.block_table), stage.book.used) == (4, 0)
    assert stage.subject.next_step().sequences == (young,)
    stage.pool.check_integrity()


def test_what_the_prefix_cache_still_has_is_not_copied_back() -> None:
    stage = Stage()
    _, young = stage.two()
    full = young.block_table[:3]
    stage.subject.copied(young, 1.0)
    stage.subject.drop(RequestKey("old", 0))
    stage.subject.admit()
    assert young.cached_blocks >= 3
    assert young.block_table[:3] == full


def test_without_host_memory_left_the_junior_goes_back_to_the_router() -> None:
    stage = Stage(slots=4)
    stage.running("old", 8)
    young = stage.running("young", 8, first=200)
    while not (step := stage.subject.next_step()).preempted:
        stage.subject.complete_step([Draw(3)] * len(step.sequences))
    assert (step.preempted, step.swapped_out) == ((young,), ())
    assert step.sequences == (stage.subject.find(RequestKey("old", 0)),), "there is room at once"


def test_a_sequence_that_is_better_prefilled_anew_is() -> None:
    stage = Stage(swaps=False)
    stage.running("old", 8)
    young = stage.running("young", 8, first=200)
    while not (step := stage.subject.next_step()).preempted:
        stage.subject.complete_step([Draw(3)] * len(step.sequences))
    assert step.preempted == (young,)


def test_the_lowest_priority_makes_room_then_the_newest() -> None:
    stage = Stage(num_blocks=13, slots=20)
    low = stage.running("low", 8, seniority=-10.0)
    stage.now = 1.0
    old, new = stage.running("old", 8, first=200), stage.running("new", 8, first=300)
    assert stage.until_swapped() is low
    stage.subject.copied(low, 1.0)
    assert stage.until_swapped() is new
    assert old.tracker.state is SequenceState.RUNNING


def test_room_goes_to_the_senior_whether_it_waits_or_is_out() -> None:
    stage = Stage()
    _, young = stage.two()
    stage.subject.copied(young, 1.0)
    later = stage.add("later", tuple(range(300, 304)))
    urgent = stage.add("urgent", tuple(range(400, 404)), seniority=5.0)
    stage.subject.drop(RequestKey("old", 0))
    assert stage.subject.admit() == [urgent, young]
    assert later.tracker.state is SequenceState.WAITING, "it would fit, but not before it is its turn"


def test_the_queue_ages() -> None:
    """A unit of priority is worth some seconds of waiting, and no more: who came so much earlier goes first."""
    stage = Stage(sequences=1)
    stage.running("first", 4)
    names = []
    for second in range(10):
        stage.now = float(second)
        # Ordinary ones at 0 and 4; each of the others counts as having waited three seconds more.
        ordinary = second in (0, 4)
        stage.add(f"at {second}", (50 + second,), seniority=0.0 if ordinary else 3.0)
    stage.subject.drop(RequestKey("first", 0))
    while admitted := stage.subject.admit():
        names.append(int(admitted[0].key.request_id.removeprefix("at ")))
        stage.subject.drop(admitted[0].key)
        stage.pool.release_all(import_owner(admitted[0].key))
    assert names == [1, 2, 0, 3, 5, 6, 4, 7, 8, 9]


@pytest.mark.parametrize("way", ["out", "in"])
@pytest.mark.parametrize("ends", ["well", "badly"])
def test_a_drop_during_a_copy_keeps_blocks_and_slots_until_it_has_ended(way: str, ends: str) -> None:
    stage = Stage()
    old, young = stage.two()
    if way == "in":
        stage.subject.copied(young, 1.0)
        stage.subject.drop(old.key)
        stage.subject.admit()
    table = list(young.block_table)
    assert stage.subject.drop(young.key) is young
    assert stage.subject.drop(young.key) is None
    assert young.tracker.state is SequenceState.LEAVING
    assert stage.book.used == 4
    assert all(stage.pool.state(block).name == "ACTIVE" for block in table)
    if ends == "well":
        stage.subject.copied(young, 2.0)
    else:
        assert not stage.subject.copy_failed(young)
    assert (young.tracker.state, stage.book.used) == (SequenceState.GONE, 0)
    assert stage.subject.find(young.key) is None
    if way == "out":
        assert stage.subject.next_step().sequences == (old,)
    stage.pool.check_integrity()
    stage.book.slots.check_integrity()


def test_a_copy_that_fails_gives_the_request_back() -> None:
    stage = Stage()
    old, young = stage.two()
    assert stage.subject.copy_failed(young)
    assert (young.tracker.state, stage.book.used) == (SequenceState.GONE, 0)
    assert stage.subject.next_step().sequences == (old,)


def test_who_has_been_out_for_too_long_is_given_up() -> None:
    stage = Stage()
    _, young = stage.two()
    stage.subject.copied(young, 10.0)
    assert stage.subject.give_up(10.0) == []
    assert stage.subject.give_up(10.1) == [young]
    assert (young.tracker.state, stage.book.used, stage.subject.waiting) == (SequenceState.GONE, 0, 0)


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
