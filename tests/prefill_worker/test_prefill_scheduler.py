"""The prefill scheduler over a real block pool: what it packs, shares and gives back."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.batch import Draw
from engine.block_pool import BlockPool
from engine.prompt import Progress
from prefill_worker.scheduler import PROMPTS, PrefillScheduler, PromptEvent
from protocol.errors import IllegalTransition
from protocol.ids import Peer, RequestKey
from protocol.messages import Prefill
from protocol.sampling import SamplingParams

ROUTER = Peer("router-0", 1)
BLOCK = 4


def request(
    name: str, token_ids: tuple[int, ...], *, salt: str = "", attempt: int = 0, seniority: float = 0.0
) -> Prefill:
    return Prefill(
        key=RequestKey(name, attempt),
        token_ids=token_ids,
        sampling=SamplingParams(max_tokens=4),
        handoff=Peer("decode-0", 1),
        cache_salt=salt,
        seniority=seniority,
    )


def scheduler(num_blocks: int = 33, *, budget: int = 8, sequences: int = 8) -> tuple[PrefillScheduler, BlockPool]:
    pool = BlockPool(num_blocks, BLOCK)
    return PrefillScheduler(pool, block_size=BLOCK, max_batch_tokens=budget, max_sequences=sequences), pool


def run_out(subject: PrefillScheduler) -> list[Progress]:
    """Step until nothing is left to compute; the drawn token is always 7."""
    seen = []
    while True:
        seen += subject.admit(0.0)
        step = subject.next_step()
        if not step:
            return seen
        done = subject.complete_step([Draw(7) if work.last else None for work in step])
        for progress in done:
            if progress.draw is not None:
                subject.release(progress.prompt)
        seen += done


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 30])
def test_chunks_cover_the_prompt_once_and_end_on_block_borders(length: int) -> None:
    subject, pool = scheduler(budget=10)
    subject.add(request("a", tuple(range(length))), ROUTER, 0.0)
    subject.admit(0.0)
    covered: list[int] = []
    blocks: list[int] = []
    while step := subject.next_step():
        (work,) = step
        chunk = step[0].chunk
        assert chunk.start == len(covered)
        assert work.last or work.stop % BLOCK == 0
        assert (chunk.sampling is not None) == work.last
        covered += chunk.token_ids
        for progress in subject.complete_step([Draw(7) if work.last else None]):
            blocks += progress.blocks
    assert covered == list(range(length))
    assert len(blocks) == -(-length // BLOCK) == len(set(blocks))
    assert pool.counts().active == len(blocks)


@pytest.mark.parametrize("known", [1, 2, BLOCK, BLOCK + 1, 7, 2 * BLOCK + 1, 15, 16, 17, 18])
def test_a_prompt_is_scored_from_the_first_unknown_token_on_whatever_is_cached(known: int) -> None:
    subject, _ = scheduler(budget=BLOCK)
    prompt = tuple(range(100, 118))
    subject.add(request("a", prompt), ROUTER, 0.0)
    run_out(subject)
    asked = msgspec.structs.replace(request("b", prompt), prompt_logprobs=3, prompt_logprobs_from=known)
    subject.add(asked, ROUTER, 0.0)
    (admitted,) = subject.admit(0.0)
    # Token ``known`` is scored by what stands before it, which is computed; what comes before that may be found.
    assert admitted.prompt.cached_tokens == min(known - 1, len(prompt) - 1) // BLOCK * BLOCK
    scored: list[int] = []
    while step := subject.next_step():
        chunk = step[0].chunk
        if chunk.span is not None:
            assert chunk.span.alternatives == 3
            first = chunk.start + chunk.span.first + 1
            assert chunk.span.targets == prompt[first : first + len(chunk.span.targets)]
            scored += chunk.span.targets
        subject.complete_step([Draw(7) if work.last else None for work in step])
    assert tuple(scored) == prompt[known:]


def test_several_prompts_share_a_step_within_its_budget() -> None:
    subject, _ = scheduler(budget=16)
    for name in "abcd":
        subject.add(request(name, tuple(range(7))), ROUTER, 0.0)
    subject.admit(0.0)
    step = subject.next_step()
    # Two whole prompts, and nothing of the third: what is left of the budget is less than a block.
    assert [(work.prompt.key.request_id, work.stop) for work in step] == [("a", 7), ("b", 7)]


def test_a_prefix_hit_is_complete_at_admission_and_skips_computation() -> None:
    subject, pool = scheduler()
    prompt = tuple(range(10))
    subject.add(request("a", prompt), ROUTER, 0.0)
    run_out(subject)
    assert pool.counts().cached == 2
    subject.add(request("b", prompt), ROUTER, 0.0)
    (admitted,) = subject.admit(0.0)
    assert admitted.prompt.cached_tokens == 8
    assert len(admitted.blocks) == 2
    (work,) = subject.next_step()
    assert (work.start, work.stop) == (8, 10)


def test_a_wholly_cached_prompt_still_computes_one_block_for_its_logits() -> None:
    subject, _ = scheduler()
    prompt = tuple(range(8))
    subject.add(request("a", prompt), ROUTER, 0.0)
    run_out(subject)
    subject.add(request("b", prompt), ROUTER, 0.0)
    (admitted,) = subject.admit(0.0)
    assert admitted.prompt.cached_tokens == 4


def test_what_was_looked_up_is_not_evicted_for_what_it_lacks() -> None:
    subject, pool = scheduler(7)
    subject.add(request("a", tuple(range(16))), ROUTER, 0.0)
    run_out(subject)
    assert (pool.counts().cached, pool.counts().free) == (4, 2)
    # Four blocks found, three lacking, two free: the room that there is are the very blocks that were found.
    subject.add(request("b", tuple(range(28))), ROUTER, 0.0)
    assert subject.admit(0.0) == []
    assert (pool.counts().cached, pool.counts().free) == (4, 2)
    subject.cancel(RequestKey("b", 0))
    subject.add(request("c", tuple(range(24))), ROUTER, 0.0)
    subject.admit(0.0)
    prompt = subject.find(RequestKey("c", 0))
    assert prompt is not None
    assert (prompt.cached_tokens, len(set(prompt.block_table))) == (16, 6)


def test_another_salt_never_hits() -> None:
    subject, _ = scheduler()
    prompt = tuple(range(12))
    subject.add(request("a", prompt, salt="tenant-1"), ROUTER, 0.0)
    run_out(subject)
    subject.add(request("b", prompt, salt="tenant-2"), ROUTER, 0.0)
    (admitted,) = subject.admit(0.0)
    assert admitted.prompt.cached_tokens == 0


def test_a_prompt_that_does_not_fit_waits_whole_and_takes_nothing() -> None:
    subject, pool = scheduler(num_blocks=6)
    subject.add(request("a", tuple(range(16))), ROUTER, 0.0)
    subject.add(request("b", tuple(range(100, 108))), ROUTER, 0.0)
    assert [progress.prompt.key.request_id for progress in subject.admit(0.0)] == ["a"]
    assert (subject.waiting, pool.counts().active) == (1, 4)
    run_out(subject)
    assert subject.waiting == 0
    assert pool.counts().active == 0


def test_cancel_during_a_step_keeps_the_blocks_until_the_step_ends() -> None:
    subject, pool = scheduler()
    subject.add(request("a", tuple(range(6))), ROUTER, 0.0)
    subject.admit(0.0)
    (work,) = subject.next_step()
    assert subject.cancel(work.prompt.key) is work.prompt
    assert pool.counts().active == 2
    assert subject.complete_step([Draw(7)]) == []
    assert pool.counts().active == 0
    assert subject.cancel(work.prompt.key) is None


def test_a_failed_step_gives_back_every_block_and_names_the_prompts() -> None:
    subject, pool = scheduler(budget=32)
    for name in "ab":
        subject.add(request(name, tuple(range(6))), ROUTER, 0.0)
    subject.admit(0.0)
    subject.next_step()
    subject.cancel(RequestKey("a", 0))
    assert [prompt.key.request_id for prompt in subject.fail_step()] == ["b"]
    assert pool.counts().active == 0
    assert subject.running == 0


def test_an_illegal_move_tells_the_story() -> None:
    tracker = PROMPTS.start("a/0")
    tracker.move(PromptEvent.ADMIT)
    tracker.move(PromptEvent.COMPLETE)
    with pytest.raises(IllegalTransition, match=r"a/0.*WAITING -ADMIT-> RUNNING -COMPLETE-> FINISHED"):
        tracker.move(PromptEvent.ADMIT)


class PrefillLife(RuleBasedStateMachine):
    """Prompts come, are cancelled at any point and finish; the pool balances after each event."""

    @initialize(blocks=st.integers(5, 40), budget=st.integers(1, 24))
    def begin(self, blocks: int, budget: int) -> None:
        self.subject, self.pool = scheduler(blocks, budget=budget)
        self.capacity = (blocks - 1) * BLOCK
        self.names = 0
        self.live: set[RequestKey] = set()
        self.stepping = False

    @rule(length=st.integers(1, 40), family=st.integers(0, 2), senior=st.integers(-2, 2), now=st.floats(0.0, 5.0))
    def add(self, length: int, family: int, senior: int, now: float) -> None:
        self.names += 1
        tokens = tuple(range(family, family + min(length, self.capacity)))
        prompt = request(f"r{self.names}", tokens, seniority=float(senior))
        self.subject.add(prompt, ROUTER, now)
        self.live.add(prompt.key)

    @rule()
    def admit(self) -> None:
        for progress in self.subject.admit(0.0):
            assert progress.prompt.key in self.live

    @precondition(lambda self: not self.stepping)
    @rule()
    def begin_step(self) -> None:
        self.step = self.subject.next_step()
        self.stepping = bool(self.step)
        assert [work.prompt.since for work in self.step] == sorted(work.prompt.since for work in self.step)
        for work in self.step:
            assert work.last or work.stop % BLOCK == 0, "what has not ended on a block's border cannot ship"

    @precondition(lambda self: self.stepping)
    @rule(fails=st.booleans())
    def end_step(self, fails: bool) -> None:
        self.stepping = False
        if fails:
            for prompt in self.subject.fail_step():
                self.live.discard(prompt.key)
            return
        for progress in self.subject.complete_step([Draw(7) if work.last else None for work in self.step]):
            if progress.draw is not None:
                self.subject.release(progress.prompt)
                self.live.discard(progress.prompt.key)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.live:
            key = data.draw(st.sampled_from(sorted(self.live)))
            assert self.subject.cancel(key) is not None
            self.live.discard(key)

    @invariant()
    def balances(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            assert self.pool.counts().leaked == 0
            assert all(0 <= slots < BLOCK for slots in self.subject.empty_slots.values())
            assert len(self.subject.empty_slots) <= self.subject.running

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        if self.stepping:
            self.end_step(fails=False)
        for progress in run_out(self.subject):
            if progress.draw is not None:
                self.live.discard(progress.prompt.key)
        assert not self.live
        assert self.pool.counts().active == 0
        self.pool.check_integrity()


TestPrefillLife = PrefillLife.TestCase
TestPrefillLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
