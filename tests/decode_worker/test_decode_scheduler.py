"""The decode scheduler over a real block pool: reservation, growth, preemption and release."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import Sequence, SequenceState, import_owner, quarantine_owner
from decode_worker.step import chunks_of
from engine.batch import Draw
from engine.block_pool import BlockPool
from protocol.ids import Peer, RequestKey
from protocol.messages import PrefillAddress, Reserve
from protocol.sampling import SamplingParams

ROUTER = Peer("router-0", 1)
PREFILL = PrefillAddress(peer=Peer("prefill-0", 1), endpoint="tcp://127.0.0.1:1")
BLOCK = 4
STOP = 9


def request(name: str, token_ids: tuple[int, ...], *, emitted: int = 0, max_tokens: int = 8) -> Reserve:
    return Reserve(
        key=RequestKey(name, 0),
        token_ids=token_ids,
        emitted=emitted,
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,)),
        prefill=PREFILL,
    )


def scheduler(num_blocks: int = 33, *, sequences: int = 8) -> tuple[DecodeScheduler, BlockPool]:
    pool = BlockPool(num_blocks, BLOCK)
    return DecodeScheduler(pool, block_size=BLOCK, max_sequences=sequences), pool


def running(subject: DecodeScheduler, name: str, length: int, **settings: int) -> Sequence:
    subject.add(request(name, tuple(range(100, 100 + length)), **settings), ROUTER, 0.0)
    (sequence,) = subject.admit()
    return subject.commit(sequence.key, 7, 0.0)


def test_a_reservation_holds_what_the_prompt_lacks_and_commit_hands_it_to_the_table() -> None:
    subject, pool = scheduler()
    subject.add(request("a", tuple(range(6))), ROUTER, 0.0)
    (sequence,) = subject.admit()
    assert (pool.counts().importing, pool.counts().active) == (2, 0)
    subject.commit(sequence.key, 7, 1.0)
    assert (pool.counts().importing, pool.counts().active) == (0, 2)
    (chunk,) = chunks_of(subject.next_step().sequences)
    assert (list(chunk.token_ids), chunk.start, chunk.position) == ([7], 6, 1)


def test_outputs_are_numbered_over_attempts_and_end_at_max_tokens() -> None:
    subject, pool = scheduler()
    # Two tokens were emitted by an earlier attempt, the third comes with the handover.
    running(subject, "a", 6, emitted=2, max_tokens=5)
    seen = []
    while step := subject.next_step().sequences:
        seen += subject.complete_step([Draw(3)] * len(step))
    assert [(output.start, output.finish_reason) for output in seen] == [(3, None), (4, "length")]
    assert pool.counts().active == 0


def test_a_stop_token_ends_the_sequence() -> None:
    subject, pool = scheduler()
    running(subject, "a", 3)
    subject.next_step()
    (output,) = subject.complete_step([Draw(STOP)])
    assert output.finish_reason == "stop"
    assert pool.counts().active == 0
    assert subject.idle


def test_what_decode_has_cached_is_not_asked_for_again() -> None:
    subject, pool = scheduler()
    running(subject, "a", 8)
    subject.drop(RequestKey("a", 0))
    assert pool.counts().cached == 2
    subject.add(request("b", tuple(range(100, 110))), ROUTER, 0.0)
    (sequence,) = subject.admit()
    assert sequence.cached_blocks == 2
    assert len(pool.holdings(import_owner(sequence.key))) == 1


def test_what_was_looked_up_is_not_evicted_for_what_it_lacks() -> None:
    subject, pool = scheduler(7)
    running(subject, "a", 16)
    subject.drop(RequestKey("a", 0))
    assert (pool.counts().cached, pool.counts().free) == (4, 2)
    # Four blocks found, three lacking, two free: the room that there is are the very blocks that were found.
    subject.add(request("b", tuple(range(100, 128))), ROUTER, 0.0)
    assert subject.admit() == []
    assert (pool.counts().cached, pool.counts().free) == (4, 2)
    subject.drop(RequestKey("b", 0))
    subject.add(request("c", tuple(range(100, 124))), ROUTER, 0.0)
    (sequence,) = subject.admit()
    assert (sequence.cached_blocks, len(set(sequence.block_table))) == (4, 6)


def test_a_full_hit_wants_no_block_at_all() -> None:
    subject, pool = scheduler()
    running(subject, "a", 8)
    subject.drop(RequestKey("a", 0))
    subject.add(request("b", tuple(range(100, 108))), ROUTER, 0.0)
    (sequence,) = subject.admit()
    assert sequence.cached_blocks == 2
    assert pool.holdings(import_owner(sequence.key)) == []
    subject.commit(sequence.key, 7, 0.0)
    assert len(subject.next_step().sequences) == 1


def test_generated_blocks_are_found_by_a_longer_prompt() -> None:
    subject, _ = scheduler()
    running(subject, "a", 6, max_tokens=8)
    produced = [7]
    while step := subject.next_step().sequences:
        produced += [output.draws[0].token_id for output in subject.complete_step([Draw(3)] * len(step))]
    subject.add(request("b", (*range(100, 106), *produced, 55)), ROUTER, 0.0)
    (sequence,) = subject.admit()
    # The last token drawn was never computed: 6 + 8 tokens, 13 of them in the pool, 3 full blocks.
    assert sequence.cached_blocks == 3


def test_admission_leaves_every_sequence_a_block_to_grow() -> None:
    subject, pool = scheduler(num_blocks=8)
    running(subject, "a", 8)
    subject.add(request("b", tuple(range(16))), ROUTER, 0.0)
    assert subject.admit() == []
    assert pool.counts().importing == 0
    subject.drop(RequestKey("a", 0))
    assert len(subject.admit()) == 1


def test_a_full_pool_preempts_the_youngest_and_the_oldest_goes_on() -> None:
    subject, pool = scheduler(num_blocks=8)
    old = running(subject, "old", 4, max_tokens=20)
    young = running(subject, "young", 5, max_tokens=20)
    preempted: list[Sequence] = []
    while not preempted:
        step = subject.next_step()
        preempted += step.preempted
        subject.complete_step([Draw(3)] * len(step.sequences))
    assert preempted == [young]
    assert young.tracker.state is SequenceState.GONE
    assert old.tracker.state is SequenceState.RUNNING
    pool.check_integrity()


def test_preempting_an_import_waits_for_its_window() -> None:
    subject, pool = scheduler(num_blocks=6)
    old = running(subject, "old", 4, max_tokens=20)
    subject.add(request("young", tuple(range(8))), ROUTER, 0.0)
    (young,) = subject.admit()
    while not (step := subject.next_step()).preempted:
        subject.complete_step([Draw(3)] * len(step.sequences))
    assert step.preempted == (young,)
    assert step.sequences == ()
    pool.move_all(import_owner(young.key), quarantine_owner(young.key))
    assert subject.next_step().sequences == ()
    pool.release_all(quarantine_owner(young.key))
    assert subject.next_step().sequences == (old,)


def test_drop_during_a_step_keeps_the_blocks_until_the_step_ends() -> None:
    subject, pool = scheduler()
    sequence = running(subject, "a", 6)
    subject.next_step()
    assert subject.drop(sequence.key) is sequence
    assert pool.counts().active == 2
    assert subject.complete_step([Draw(3)]) == []
    assert pool.counts().active == 0


def test_a_failed_step_names_the_sequences_nobody_had_dropped() -> None:
    subject, pool = scheduler()
    first, second = running(subject, "a", 6), running(subject, "b", 3)
    subject.next_step()
    subject.drop(first.key)
    assert subject.fail_step() == [second]
    assert pool.counts().active == 0


@pytest.mark.parametrize("event", ["waiting", "importing", "running"])
def test_sequences_of_a_lost_router_are_found_in_every_state(event: str) -> None:
    subject, _ = scheduler(sequences=1 if event == "waiting" else 8)
    if event == "waiting":
        running(subject, "first", 3)
    subject.add(request("a", (1, 2, 3)), ROUTER, 0.0)
    for sequence in subject.admit():
        if event == "running":
            subject.commit(sequence.key, 7, 0.0)
    assert RequestKey("a", 0) in subject.asked_by(ROUTER)
    assert subject.asked_by(Peer("router-0", 2)) == []


class DecodeLife(RuleBasedStateMachine):
    """Sequences come, are dropped at any point, preempted and finished; the pool balances after each event."""

    @initialize(blocks=st.integers(12, 30), sequences=st.integers(1, 6))
    def begin(self, blocks: int, sequences: int) -> None:
        self.subject, self.pool = scheduler(blocks, sequences=sequences)
        self.names = 0
        self.live: dict[RequestKey, Sequence] = {}
        self.quarantined: set[RequestKey] = set()
        self.stepping = False

    def end_import(self, key: RequestKey) -> None:
        if self.pool.holdings(import_owner(key)):
            self.pool.move_all(import_owner(key), quarantine_owner(key))
            self.quarantined.add(key)

    def importing(self) -> list[RequestKey]:
        return sorted(k for k, s in self.live.items() if s.tracker.state is SequenceState.IMPORTING)

    @rule(length=st.integers(1, 24), family=st.integers(0, 2), max_tokens=st.integers(2, 16))
    def add(self, length: int, family: int, max_tokens: int) -> None:
        self.names += 1
        asked = request(f"r{self.names:04}", tuple(range(family, family + length)), max_tokens=max_tokens)
        self.live[asked.key] = self.subject.add(asked, ROUTER, 0.0)

    @rule()
    def admit(self) -> None:
        self.subject.admit()

    @precondition(lambda self: self.importing())
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.subject.commit(data.draw(st.sampled_from(self.importing())), 7, 0.0)

    @precondition(lambda self: not self.stepping)
    @rule()
    def begin_step(self) -> None:
        self.step = self.subject.next_step()
        for sequence in self.step.preempted:
            del self.live[sequence.key]
            self.end_import(sequence.key)
        self.stepping = bool(self.step.sequences)

    @precondition(lambda self: self.stepping)
    @rule(token=st.sampled_from([3, 4, STOP]), fails=st.booleans())
    def end_step(self, token: int, fails: bool) -> None:
        self.stepping = False
        if fails:
            for sequence in self.subject.fail_step():
                del self.live[sequence.key]
            return
        for output in self.subject.complete_step([Draw(token)] * len(self.step.sequences)):
            if output.finish_reason is not None:
                del self.live[output.sequence.key]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.live)))
        assert self.subject.drop(key) is self.live.pop(key)
        self.end_import(key)

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def quiesce(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.quarantined)))
        self.quarantined.discard(key)
        self.pool.release_all(quarantine_owner(key))

    @invariant()
    def balances(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            assert self.pool.counts().leaked == 0

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
            self.subject.admit()
            for key in self.importing():
                self.subject.commit(key, 7, 0.0)
            self.begin_step()
            if self.stepping:
                self.end_step(token=3, fails=False)
            if not self.live:
                break
        assert not self.live, "a sequence never ended"
        for key in self.quarantined:
            self.pool.release_all(quarantine_owner(key))
        counts = self.pool.counts()
        assert counts.free + counts.cached + counts.reserved == counts.total


TestDecodeLife = DecodeLife.TestCase
TestDecodeLife.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
