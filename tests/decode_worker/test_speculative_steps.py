"""Steps with drafts over a real pool: the text is that of plain steps, and no block holds a wrong token that counts."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from paper_engine import PaperEngine

from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import Sequence, SequenceState, import_owner, quarantine_owner
from decode_worker.speculation import Speculation
from decode_worker.speculator import Speculator
from decode_worker.step import chunks_of
from engine.batch import Draw
from engine.block_pool import BlockPool
from engine.prefix_index import block_hashes
from protocol.forks import Fork
from protocol.ids import Peer, RequestKey
from protocol.messages import PrefillAddress, Reserve
from protocol.sampling import SamplingParams

ROUTER = Peer("router-0", 1)
PREFILL = PrefillAddress(peer=Peer("prefill-0", 1), endpoint="tcp://127.0.0.1:1")
BLOCK = 4
STOP = 9


def model(token_ids: Seq[int]) -> int:
    """Repeats itself for a while, then goes on otherwise; now and then it stops."""
    before = token_ids[-2] if len(token_ids) > 1 else 1
    return (token_ids[-1] * 3 + before) % 9 + (len(token_ids) % 37 == 0)


def plain(prompt: Seq[int], max_tokens: int) -> list[int]:
    text = list(prompt)
    while len(text) - len(prompt) < max_tokens:
        text.append(model(text))
        if text[-1] == STOP:
            break
    return text[len(prompt) :]


def request(
    name: str, token_ids: Seq[int], *, attempt: int = 0, emitted: int = 0, max_tokens: int = 40, **sampling: object
) -> Reserve:
    rules = {"max_tokens": max_tokens, "stop_token_ids": (STOP,), **sampling}
    return Reserve(
        key=RequestKey(name, attempt),
        token_ids=tuple(token_ids),
        emitted=emitted,
        sampling=SamplingParams(**rules),  # type: ignore[arg-type]
        prefill=PREFILL,
    )


def speculating(num_blocks: int = 65, *, rows: int = 16, tokens: int = 4) -> tuple[DecodeScheduler, BlockPool]:
    pool = BlockPool(num_blocks, BLOCK)
    speculator = Speculator(Speculation(tokens=tokens), pool, block_size=BLOCK, max_rows=rows)
    return DecodeScheduler(pool, block_size=BLOCK, max_sequences=rows, speculator=speculator), pool


def running(subject: DecodeScheduler, engine: PaperEngine, asked: Reserve, first: int) -> Sequence:
    subject.add(asked, ROUTER, 0.0)
    (sequence,) = subject.admit()
    engine.load(sequence.token_ids, sequence.block_table)
    return subject.commit(sequence.key, first, 0.0)


def period(token_ids: Seq[int]) -> int:
    return token_ids[-5]


CYCLE = [1, 2, 3, 4, 5]


def test_one_pass_gives_what_the_draft_foresaw_and_one_token_more() -> None:
    subject, pool = speculating()
    engine = PaperEngine(BLOCK, period)
    sequence = running(subject, engine, request("a", CYCLE * 3), 1)
    step = subject.next_step()
    assert sequence.draft == (2, 3)
    chunks = chunks_of(step.sequences)
    assert [(chunk.token_ids, chunk.start, chunk.position) for chunk in chunks] == [
        ((1,), 15, 1),
        ((2,), 16, 2),
        ((3,), 17, 3),
    ]
    (output,) = subject.complete_step(engine.execute(chunks))
    assert (output.start, [draw.token_id for draw in output.draws]) == (1, [2, 3, 4])
    assert (sequence.produced, sequence.computed, len(sequence.block_table)) == (4, 18, 5)
    pool.check_integrity()


def test_a_wrong_token_ends_the_draft_and_its_blocks_go_back() -> None:
    subject, pool = speculating()
    engine = PaperEngine(BLOCK, lambda seen: 8)
    sequence = running(subject, engine, request("a", CYCLE * 3), 1)
    before = pool.counts()
    step = subject.next_step()
    assert pool.counts().active == before.active + 1, "a draft that reaches into the next block holds it for the step"
    assert subject.empty_slots == 5 * BLOCK - 16 - len(sequence.draft) < BLOCK, "a draft's slots are in use"
    (output,) = subject.complete_step(engine.execute(chunks_of(step.sequences)))
    assert [draw.token_id for draw in output.draws] == [8]
    assert (sequence.computed, pool.counts().active, pool.counts().free) == (16, before.active, before.free)
    assert len(sequence.block_table) == 4
    pool.check_integrity()


def test_forks_of_one_prompt_draft_each_for_itself() -> None:
    subject, pool = speculating()
    engine = PaperEngine(BLOCK, period)
    forks = (Fork(RequestKey("b", 0), 1), Fork(RequestKey("c", 0), 2))
    first = running(subject, engine, msgspec.structs.replace(request("a", CYCLE * 3), forks=forks), 1)
    found = {"a": [1], "b": [2], "c": [1]}
    for index, fork in enumerate(forks):
        subject.fork(first, index, found[fork.key.request_id][0])
    turns = 0
    while stepping := subject.next_step().sequences:
        turns += len(stepping)
        for output in subject.complete_step(engine.execute(chunks_of(stepping))):
            found[output.sequence.key.request_id] += [draw.token_id for draw in output.draws]
        pool.check_integrity()
    for tokens in found.values():
        text = [*CYCLE * 3, tokens[0]]
        while len(text) < 15 + 40:
            text.append(period(text))
        assert tokens == text[15:]
    assert turns < 3 * 39 // 2
    assert pool.counts().active == 0


def test_penalties_look_back_on_the_draft_before_each_row() -> None:
    subject, _ = speculating()
    engine = PaperEngine(BLOCK, period)
    running(subject, engine, request("a", CYCLE * 3, repetition_penalty=1.2), 1)
    histories = [list(chunk.history) for chunk in chunks_of(subject.next_step().sequences)]
    assert histories == [[*CYCLE * 3, 1], [*CYCLE * 3, 1, 2], [*CYCLE * 3, 1, 2, 3]]


@pytest.mark.parametrize("max_tokens", [2, 3, 4, 5, 9])
def test_no_row_is_drawn_beyond_max_tokens(max_tokens: int) -> None:
    subject, pool = speculating()
    engine = PaperEngine(BLOCK, period)
    running(subject, engine, request("a", CYCLE * 3, max_tokens=max_tokens), 1)
    found, finish = [1], None
    while stepping := subject.next_step().sequences:
        chunks = chunks_of(stepping)
        assert len(found) + len(chunks) <= max_tokens
        (output,) = subject.complete_step(engine.execute(chunks))
        found += [draw.token_id for draw in output.draws]
        finish = output.finish_reason
    assert (found, finish) == ((CYCLE * 3)[:max_tokens], "length")
    assert pool.counts().active == 0


def test_nothing_is_drafted_from_a_stop_token_on() -> None:
    subject, _ = speculating(tokens=8)
    engine = PaperEngine(BLOCK, period)
    sequence = running(subject, engine, request("a", [1, 2, STOP, 4, 5] * 3), 1)
    step = subject.next_step()
    assert sequence.draft == (2,)
    (output,) = subject.complete_step(engine.execute(chunks_of(step.sequences)))
    assert ([draw.token_id for draw in output.draws], output.finish_reason) == ([2, STOP], "stop")


def test_drafts_take_only_rows_that_sequences_leave() -> None:
    subject, _ = speculating(rows=4)
    engine = PaperEngine(BLOCK, period)
    sequences = [running(subject, engine, request(name, CYCLE * 3), 1) for name in ("a", "b", "c")]
    assert len(chunks_of(subject.next_step().sequences)) == 4
    assert [len(sequence.draft) for sequence in sequences] == [1, 0, 0], "the oldest first"


def test_a_draft_takes_no_block_that_a_sequence_may_need() -> None:
    # Two sequences hold five of seven blocks, three of them together: each may want one more for its own next token.
    subject, pool = speculating(num_blocks=8)
    engine = PaperEngine(BLOCK, period)
    first, second = (running(subject, engine, request(name, CYCLE * 3), 1) for name in ("a", "b"))
    subject.next_step()
    assert pool.available == 2
    assert (first.draft, second.draft) == ((), ()), "they have one free slot, and it is the next token's"
    subject.drop(second.key)
    subject.complete_step(engine.execute(chunks_of((first, second))))
    subject.next_step()
    assert first.draft


def test_a_sequence_dropped_in_mid_step_gives_back_what_its_draft_held() -> None:
    subject, pool = speculating()
    engine = PaperEngine(BLOCK, period)
    leaving = running(subject, engine, request("a", CYCLE * 3), 1)
    staying = running(subject, engine, request("b", [7, 8, 7, 8, 7], max_tokens=9), 8)
    step = subject.next_step()
    subject.drop(leaving.key)
    held = pool.counts().active
    (output,) = subject.complete_step(engine.execute(chunks_of(step.sequences)))
    assert output.sequence is staying
    assert pool.counts().active == held - 5
    pool.check_integrity()


def test_a_failed_step_gives_back_what_drafts_held() -> None:
    subject, pool = speculating()
    running(subject, PaperEngine(BLOCK, period), request("a", CYCLE * 3), 1)
    subject.next_step()
    assert len(subject.fail_step()) == 1
    assert pool.counts().active == 0
    pool.check_integrity()


class SpeculativeLife(RuleBasedStateMachine):
    """Requests come, are dropped, preempted and prefilled anew; each that ends has the text of plain decoding."""

    @initialize(blocks=st.integers(12, 30), rows=st.integers(1, 8), tokens=st.integers(1, 6))
    def begin(self, blocks: int, rows: int, tokens: int) -> None:
        self.subject, self.pool = speculating(blocks, rows=rows, tokens=tokens)
        self.rows = rows
        self.engine = PaperEngine(BLOCK, model)
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.found: dict[str, list[int]] = {}
        self.live: dict[RequestKey, Sequence] = {}
        self.quarantined: set[RequestKey] = set()
        self.step: tuple[Sequence, ...] = ()

    def add_attempt(self, name: str, attempt: int) -> None:
        prompt, max_tokens = self.asked[name]
        found = self.found[name]
        asked = request(name, prompt + found, attempt=attempt, emitted=len(found), max_tokens=max_tokens)
        self.live[asked.key] = self.subject.add(asked, ROUTER, 0.0)

    def forget(self, key: RequestKey) -> None:
        del self.live[key]
        if self.pool.holdings(import_owner(key)):
            self.pool.move_all(import_owner(key), quarantine_owner(key))
            self.quarantined.add(key)

    def importing(self) -> list[RequestKey]:
        return sorted(k for k, s in self.live.items() if s.tracker.state is SequenceState.IMPORTING)

    @rule(pattern=st.lists(st.integers(0, 5), min_size=1, max_size=4), turns=st.integers(1, 6), most=st.integers(1, 40))
    def add(self, pattern: list[int], turns: int, most: int) -> None:
        name = f"r{len(self.asked):04}"
        self.asked[name], self.found[name] = (pattern * turns, most), []
        self.add_attempt(name, 0)

    @rule()
    def admit(self) -> None:
        self.subject.admit()

    @precondition(lambda self: self.importing())
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.commit_one(data.draw(st.sampled_from(self.importing())))

    def commit_one(self, key: RequestKey) -> None:
        sequence = self.live[key]
        cached = sequence.cached_blocks * BLOCK
        assert self.engine.seen(sequence.block_table, cached) == sequence.token_ids[:cached], "a wrong prefix hit"
        self.engine.load(sequence.token_ids, sequence.block_table)
        first = model(sequence.token_ids)
        self.found[key.request_id].append(first)
        if sequence.request.sampling.finish_reason(first, len(self.found[key.request_id])) is not None:
            assert self.subject.drop(key) is sequence
            self.forget(key)
            return
        self.subject.commit(key, first, 0.0)

    @precondition(lambda self: not self.step)
    @rule()
    def begin_step(self) -> None:
        step = self.subject.next_step()
        for sequence in step.preempted:
            self.forget(sequence.key)
            self.add_attempt(sequence.key.request_id, sequence.key.attempt + 1)
        self.step = step.sequences
        assert len(chunks_of(self.step)) <= self.rows

    @precondition(lambda self: self.step)
    @rule()
    def end_step(self) -> None:
        draws = self.engine.execute(chunks_of(self.step))
        self.step = ()
        for output in self.subject.complete_step(draws):
            name, sequence = output.sequence.key.request_id, output.sequence
            assert output.start == len(self.found[name])
            self.found[name] += [draw.token_id for draw in output.draws]
            if output.finish_reason is not None:
                prompt, most = self.asked[name]
                assert self.found[name] == plain(prompt, most)
                del self.live[sequence.key]
                continue
            assert len(sequence.block_table) == -(-sequence.computed // BLOCK), "blocks without a token that counts"
            full = sequence.computed // BLOCK
            assert sequence.hashes[:full] == block_hashes(sequence.token_ids[: full * BLOCK], BLOCK)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.live)))
        assert self.subject.drop(key) is self.live[key]
        self.forget(key)

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
        """Whatever happened, everything ends by itself, and with the right text."""
        if not hasattr(self, "pool"):
            return
        for _ in range(3000):
            if self.step:
                self.end_step()
            for key in sorted(self.quarantined):
                self.pool.release_all(quarantine_owner(key))
            self.quarantined.clear()
            self.subject.admit()
            for key in self.importing():
                self.commit_one(key)
            self.begin_step()
            if not self.live and not self.quarantined:
                break
        assert not self.live, "a sequence never ended"
        counts = self.pool.counts()
        assert counts.free + counts.cached + counts.reserved == counts.total


TestSpeculativeLife = SpeculativeLife.TestCase
TestSpeculativeLife.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)


def test_draws_are_those_of_single_rows() -> None:
    """The whole of a long, half predictable text, with drafts of every length."""
    prompt = [1, 2, 3]
    for tokens in (1, 3, 8):
        subject, pool = speculating(tokens=tokens)
        engine = PaperEngine(BLOCK, model)
        running(subject, engine, request("a", prompt, max_tokens=120), model(prompt))
        found = [Draw(model(prompt))]
        steps = 0
        while stepping := subject.next_step().sequences:
            steps += 1
            for output in subject.complete_step(engine.execute(chunks_of(stepping))):
                found += output.draws
        expected = plain(prompt, 120)
        assert [draw.token_id for draw in found] == expected
        assert steps < len(expected) - 1, "no draft was ever right"
        assert pool.counts().active == 0
