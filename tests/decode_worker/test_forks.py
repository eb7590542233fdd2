"""Forks of one prompt over a real pool, with a model of its memory: nobody ever reads what another has written."""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.pool_waste import measure
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import Sequence, SequenceState, import_owner
from decode_worker.speculation import Speculation
from decode_worker.speculator import Speculator
from decode_worker.step import Step, chunks_of
from engine.batch import Draw
from engine.block_pool import BlockPool
from protocol.forks import Fork
from protocol.ids import Peer, RequestKey
from protocol.messages import PrefillAddress, Reserve
from protocol.sampling import SamplingParams

ROUTER = Peer("router-0", 1)
PREFILL = PrefillAddress(peer=Peer("prefill-0", 1), endpoint="tcp://127.0.0.1:1")
BLOCK = 4
STOP = 9


def request(name: str, length: int, forks: int, *, max_tokens: int = 12) -> Reserve:
    return Reserve(
        key=RequestKey(name, 0),
        token_ids=tuple(range(100, 100 + length)),
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,)),
        prefill=PREFILL,
        forks=tuple(Fork(RequestKey(f"{name}-{index}", 0), index + 1) for index in range(forks)),
    )


class Bench:
    """A scheduler, its pool, and what each slot of the pool holds."""

    def __init__(self, num_blocks: int = 41, sequences: int = 12, window: int = 0, guesses: bool = False) -> None:
        self.pool = BlockPool(num_blocks, BLOCK)
        settings = Speculation(min_match=1, tokens=6)
        self.guesses = Speculator(settings, self.pool, block_size=BLOCK, max_rows=2 * sequences) if guesses else None
        self.scheduler = DecodeScheduler(
            self.pool, block_size=BLOCK, max_sequences=sequences, window=window, speculator=self.guesses
        )
        self.window = window
        self.slots: dict[int, int] = {}
        self.copies = 0
        self.drawn = 10

    def commit(self, sequence: Sequence, wanted: int) -> list[Sequence]:
        """The import has landed; of its forks ``wanted`` go on."""
        hits = sequence.cached_blocks * BLOCK
        for index, token in list(enumerate(sequence.token_ids))[hits:]:
            self.slots[self.slot(sequence.block_table, index)] = token
        self.scheduler.commit(sequence.key, self.token(), 0.0)
        return [sequence, *(self.scheduler.fork(sequence, index, self.token()) for index in range(wanted))]

    def token(self) -> int:
        self.drawn += 1
        # Where there are guesses, few tokens in turn, so that some of them are right.
        return 20 + self.drawn % 3 if self.guesses else self.drawn

    def slot(self, table: list[int], index: int) -> int:
        return table[index // BLOCK] * BLOCK + index % BLOCK

    def begin(self) -> Step:
        """The next step, computed: copies first, then every chunk stores its tokens, then each reads its own."""
        step = self.scheduler.next_step()
        chunks = chunks_of(step.sequences)
        copied = [chunk.copied for chunk in chunks if chunk.copied is not None]
        self.copies += len(copied)
        before = dict(self.slots)
        for source, target in copied:
            assert self.pool.holders(source), "nobody holds what is read"
            for offset in range(BLOCK):
                if (held := before.get(source * BLOCK + offset)) is not None:
                    self.slots[target * BLOCK + offset] = held
        for chunk in chunks:
            for offset, token in enumerate(chunk.token_ids):
                self.slots[self.slot(list(chunk.block_table), chunk.start + offset)] = token
        for sequence in step.sequences:
            table, length = sequence.block_table, len(sequence.token_ids)
            seen = range(max(0, length - self.window) if self.window else 0, length)
            assert [self.slots.get(self.slot(table, i)) for i in seen] == sequence.token_ids[seen.start :]
        return step

    def end(self, step: Step, token: int | None = None) -> list[Sequence]:
        """Returns who has finished."""
        draws = [Draw(self.token() if token is None else token) for _ in chunks_of(step.sequences)]
        outputs = self.scheduler.complete_step(draws)
        return [output.sequence for output in outputs if output.finish_reason is not None]


def test_all_but_one_copy_the_partial_block_and_the_full_ones_stay_shared() -> None:
    bench = Bench()
    bench.scheduler.add(request("a", 10, 4), ROUTER, 0.0)
    (first,) = bench.scheduler.admit()
    sequences = bench.commit(first, 4)
    tail = first.block_table[-1]
    assert bench.pool.counts().active == 3
    assert all(bench.pool.holders(block) == 5 for block in first.block_table)
    step = bench.begin()
    assert bench.copies == 4
    bench.end(step)
    assert [sequence.block_table[:2] for sequence in sequences] == [first.block_table[:2]] * 5
    assert len({sequence.block_table[2] for sequence in sequences}) == 5
    assert sequences[-1].block_table[2] == tail, "the last writes where it stands"
    assert bench.pool.counts().active == 2 + 5
    bench.end(bench.begin())
    assert bench.copies == 4


def test_a_prompt_that_fills_its_blocks_has_nothing_to_copy() -> None:
    bench = Bench()
    bench.scheduler.add(request("a", 8, 2), ROUTER, 0.0)
    (first,) = bench.scheduler.admit()
    bench.commit(first, 2)
    bench.end(bench.begin())
    assert bench.copies == 0
    assert bench.pool.counts().active == 2 + 3


def test_each_continuation_is_found_by_its_own_tokens() -> None:
    bench = Bench()
    bench.scheduler.add(request("a", 6, 2, max_tokens=40), ROUTER, 0.0)
    (first,) = bench.scheduler.admit()
    sequences = bench.commit(first, 2)
    for _ in range(2 * BLOCK):
        bench.end(bench.begin())
    texts = [tuple(sequence.token_ids[:12]) for sequence in sequences]
    for sequence in sequences:
        bench.scheduler.drop(sequence.key)
    for index, token_ids in enumerate(texts):
        asked = msgspec.structs.replace(request(f"again{index}", 1, 0), token_ids=token_ids)
        bench.scheduler.add(asked, ROUTER, 0.0)
        (again,) = bench.scheduler.admit()
        assert again.cached_blocks == 3
        bench.commit(again, 0)
        bench.begin()  # reads what the hit found, and nothing was written there since
        bench.scheduler.fail_step()


def test_who_is_alone_with_the_block_writes_it() -> None:
    bench = Bench()
    bench.scheduler.add(request("a", 6, 2), ROUTER, 0.0)
    (first,) = bench.scheduler.admit()
    _, second, third = bench.commit(first, 2)
    for gone in (first, third):
        bench.scheduler.drop(gone.key)
    bench.end(bench.begin())
    assert bench.copies == 0
    assert second.block_table == first.block_table


def test_a_source_is_held_until_the_step_that_reads_it_has_ended() -> None:
    bench = Bench()
    bench.scheduler.add(request("a", 6, 1), ROUTER, 0.0)
    (first,) = bench.scheduler.admit()
    _, fork = bench.commit(first, 1)
    tail = first.block_table[-1]
    step = bench.begin()
    # Both leave while the step runs: what it reads and writes stays theirs.
    assert (bench.scheduler.drop(first.key), bench.scheduler.drop(fork.key)) == (first, fork)
    assert bench.pool.holders(tail) == 2
    assert bench.pool.counts().active == 3
    bench.end(step)
    assert (bench.pool.counts().active, bench.scheduler.idle) == (0, True)


def test_a_request_waits_until_all_of_its_continuations_may_run() -> None:
    bench = Bench(sequences=4)
    bench.scheduler.add(request("a", 3, 1), ROUTER, 0.0)
    bench.scheduler.add(request("b", 3, 2), ROUTER, 0.0)
    (first,) = bench.scheduler.admit()
    bench.commit(first, 1)
    assert bench.scheduler.admit() == []
    bench.scheduler.drop(first.key)
    assert len(bench.scheduler.admit()) == 1


def test_guesses_are_stored_in_the_copy_and_not_in_the_shared_block() -> None:
    bench = Bench(guesses=True)
    bench.scheduler.add(request("a", 6, 2, max_tokens=60), ROUTER, 0.0)
    (first,) = bench.scheduler.admit()
    bench.commit(first, 2)
    for _ in range(20):
        bench.end(bench.begin())
    assert bench.copies == 2
    assert bench.guesses is not None
    assert bench.guesses.accepted > 0, "no guess was right"


def test_blocks_that_the_window_has_passed_are_given_back() -> None:
    bench = Bench(num_blocks=12, window=6)
    bench.scheduler.add(request("a", 9, 1, max_tokens=200), ROUTER, 0.0)
    (first,) = bench.scheduler.admit()
    bench.commit(first, 1)
    # The next token is the tenth and sees the fifth to the tenth: the first block is out of sight.
    assert (first.passed, first.block_table[0], bench.pool.counts().cached) == (1, 0, 1)
    for _ in range(100):
        bench.end(bench.begin())
        # Six tokens lie in three blocks at most, and each of the two has its own.
        assert bench.pool.counts().active <= 6
    assert bench.copies == 1
    # What was given back is found, as long as nobody else needs the room.
    bench.scheduler.drop(first.key)
    bench.pool.check_integrity()


def test_a_window_gives_back_what_a_prefix_hit_shares() -> None:
    bench = Bench(window=5)
    for name in ("a", "b"):
        bench.scheduler.add(request(name, 17, 0, max_tokens=50), ROUTER, 0.0)
    first, second = bench.scheduler.admit()
    bench.commit(first, 0)
    bench.commit(second, 0)
    bench.scheduler.add(request("c", 17, 0, max_tokens=50), ROUTER, 0.0)
    (third,) = bench.scheduler.admit()
    assert third.cached_blocks == 4, "given back, and found again"
    bench.commit(third, 0)
    for _ in range(30):
        bench.end(bench.begin())
    bench.pool.check_integrity()


def test_requests_like_those_of_people_waste_little() -> None:
    found = measure(16, requests=120, sequences=32, num_blocks=1500)
    assert found.share < 0.04
    assert found.most < 16
    assert found.whole > 0.5, "the trace is too easy"


class ForkLife(RuleBasedStateMachine):
    """Prompts with forks come; each continuation is dropped, preempted and finished by itself."""

    @initialize(
        blocks=st.integers(8, 24),
        sequences=st.integers(4, 9),
        window=st.sampled_from([0, 1, 3, 4, 5, 9]),
        guesses=st.booleans(),
    )
    def begin(self, blocks: int, sequences: int, window: int, guesses: bool) -> None:
        self.bench = Bench(blocks, sequences, window, guesses)
        self.names = 0
        self.live: dict[RequestKey, Sequence] = {}
        self.step: Step | None = None

    @rule(length=st.integers(1, 14), forks=st.integers(0, 3), max_tokens=st.integers(2, 10))
    def add(self, length: int, forks: int, max_tokens: int) -> None:
        self.names += 1
        asked = request(f"r{self.names:03}", length, forks, max_tokens=max_tokens)
        self.live[asked.key] = self.bench.scheduler.add(asked, ROUTER, 0.0)

    @rule(data=st.data())
    def admit_and_commit(self, data: st.DataObject) -> None:
        for sequence in self.bench.scheduler.admit():
            wanted = data.draw(st.integers(0, len(sequence.request.forks)))
            for each in self.bench.commit(sequence, wanted):
                self.live[each.key] = each

    @precondition(lambda self: self.step is None)
    @rule()
    def begin_step(self) -> None:
        step = self.bench.begin()
        for sequence in step.preempted:
            del self.live[sequence.key]
        self.step = step if step.sequences else None

    @precondition(lambda self: self.step is not None)
    @rule(stops=st.booleans(), fails=st.booleans())
    def end_step(self, stops: bool, fails: bool) -> None:
        step, self.step = self.step, None
        assert step is not None
        gone = self.bench.scheduler.fail_step() if fails else self.bench.end(step, STOP if stops else None)
        for sequence in gone:
            del self.live[sequence.key]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.live)))
        self.bench.scheduler.drop(key)
        del self.live[key]

    @invariant()
    def balances(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.pool.check_integrity()
        holding = [sequence for sequence in self.live.values() if sequence.block_table]
        leaving = 0 if self.step is None else len(self.step.sequences)
        assert self.bench.scheduler.empty_slots <= (BLOCK - 1) * (len(holding) + leaving)

    def teardown(self) -> None:
        """Whatever happened, everything drains by itself."""
        if not hasattr(self, "bench"):
            return
        for _ in range(1000):
            if self.step is not None:
                self.end_step(stops=False, fails=False)
            for sequence in self.bench.scheduler.admit():
                self.bench.commit(sequence, 0)
            self.begin_step()
            if not self.live:
                break
        assert not self.live, "a sequence never ended"
        counts = self.bench.pool.counts()
        assert counts.free + counts.cached + counts.reserved == counts.total
        assert all(
            not self.bench.pool.holdings(import_owner(RequestKey(f"r{index:03}", 0))) for index in range(self.names)
        )


TestForkLife = ForkLife.TestCase
TestForkLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_fork_begins_where_its_request_was_committed() -> None:
    bench = Bench()
    bench.scheduler.add(request("a", 5, 2), ROUTER, 0.0)
    (first,) = bench.scheduler.admit()
    _, one, two = bench.commit(first, 2)
    assert (one.tracker.state, one.computed, one.produced) == (SequenceState.RUNNING, 5, 1)
    assert (one.request.sampling.seed, two.request.sampling.seed) == (1, 2)
    assert len({first.order, one.order, two.order}) == 3
