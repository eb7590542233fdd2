"""Prompts that the decode scheduler computes itself: shares of steps, room, preemption, and a pool that balances."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper_engine import PaperEngine

from decode_worker.refusal import prefill_refusal
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import Sequence, SequenceState
from decode_worker.step import chunks_of
from engine.batch import Draw
from engine.block_pool import BlockPool
from protocol.forks import Fork
from protocol.ids import Peer, RequestKey
from protocol.messages import Prefill
from protocol.sampling import SamplingParams

ROUTER, ME = Peer("router-0", 1), Peer("decode-0", 1)
BLOCK = 4


def request(name: str, tokens: tuple[int, ...], *, max_tokens: int = 6, **fields: object) -> Prefill:
    return Prefill(
        key=RequestKey(name, 0),
        token_ids=tokens,
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        handoff=ME,
        **fields,  # type: ignore[arg-type]
    )


def scheduler(num_blocks: int = 33, *, step_tokens: int = 10, sequences: int = 8) -> DecodeScheduler:
    pool = BlockPool(num_blocks, BLOCK)
    return DecodeScheduler(pool, block_size=BLOCK, max_sequences=sequences, step_tokens=step_tokens)


def model(tokens: object) -> int:
    return hash(tuple(tokens)) % 250  # type: ignore[arg-type]


def text(prompt: tuple[int, ...], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(model(tokens))
    return tokens[len(prompt) :]


def run(subject: DecodeScheduler, engine: PaperEngine, told: dict[RequestKey, list[int]]) -> list[Sequence]:
    """One step; returns who had to make room before it."""
    step = subject.next_step()
    subject.admit()
    chunks = chunks_of(step.sequences)
    draws = [draw if chunk.sampling else None for chunk, draw in zip(chunks, engine.execute(chunks), strict=True)]
    for output in subject.complete_step(draws):
        told[output.sequence.key] += [draw.token_id for draw in output.draws]
    for computed in subject.take_computed():
        if computed.draw is not None:
            told[computed.sequence.key].append(computed.draw.token_id)
            subject.begin(computed.sequence, computed.draw.token_id, 0.0)
    return list(step.preempted)


def test_running_sequences_come_first_and_prompts_take_what_is_left() -> None:
    subject = scheduler(step_tokens=10)
    short, long = (
        subject.add(request("a", (1, 2, 3)), ROUTER, 0.0),
        subject.add(request("b", (*range(30),)), ROUTER, 1.0),
    )
    subject.admit()
    assert (subject.running, subject.waiting, subject.waiting_tokens) == (2, 0, 33)
    # Three tokens of the senior's whole prompt; of the other seven only whole blocks.
    assert [(len(chunk.token_ids), chunk.sampling is None) for chunk in chunks_of(subject.next_step().sequences)] == [
        (3, False),
        (4, True),
    ]
    subject.complete_step([Draw(7), None])
    (first, second) = subject.take_computed()
    assert (first.sequence, first.tokens, second.sequence, second.draw) == (short, 3, long, None)
    subject.begin(short, 7, 1.0)
    assert (short.tracker.state, short.produced) == (SequenceState.RUNNING, 1)
    # A token of the one beside eight of the other's prompt.
    assert [len(chunk.token_ids) for chunk in chunks_of(subject.next_step().sequences)] == [1, 8]


def test_a_full_budget_still_lets_the_senior_prompt_on_by_a_block() -> None:
    subject = scheduler(step_tokens=2)
    for name in "abc":
        subject.add(request(name, (5,)), ROUTER, 0.0)
        subject.admit()
        subject.next_step()
        subject.complete_step([Draw(1)] * (1 + "abc".index(name)))
        for computed in subject.take_computed():
            subject.begin(computed.sequence, 1, 0.0)
    subject.add(request("d", (*range(9),)), ROUTER, 0.0)
    subject.admit()
    assert [len(chunk.token_ids) for chunk in chunks_of(subject.next_step().sequences)] == [1, 1, 1, 4]


def test_its_own_prefix_cache_saves_all_but_the_last_token() -> None:
    subject, engine = scheduler(), PaperEngine(BLOCK, model)
    told: dict[RequestKey, list[int]] = {RequestKey(name, 0): [] for name in "ab"}
    for name in "ab":
        subject.add(request(name, (*range(8),)), ROUTER, 0.0)
        subject.admit()
        while not subject.idle:
            run(subject, engine, told)
    assert told[RequestKey("a", 0)] == told[RequestKey("b", 0)] == text((*range(8),), 6)
    subject.add(request("c", (*range(8),)), ROUTER, 0.0)
    (again,) = subject.admit()
    assert (again.cached_blocks, again.computed) == (1, BLOCK), "the last token's logits are wanted"


@pytest.mark.parametrize("stage", ["waiting", "placed", "in step", "begun"])
def test_a_prompt_that_is_dropped_gives_back_its_blocks(stage: str) -> None:
    subject = scheduler(sequences=1)
    blocker = subject.add(request("z", (1,)), ROUTER, 0.0) if stage == "waiting" else None
    sequence = subject.add(request("a", (*range(12),)), ROUTER, 1.0)
    subject.admit()
    if stage in ("in step", "begun"):
        subject.next_step()
    if stage == "begun":
        subject.complete_step([None])
        subject.next_step()
        subject.complete_step([Draw(7)])
        subject.begin(sequence, 7, 0.0)
    assert subject.drop(sequence.key) is sequence
    assert subject.drop(sequence.key) is None
    if stage == "in step":
        assert subject._pool.counts().active == 3, "the step still writes there"
        assert not subject.complete_step([None])
        assert not subject.take_computed()
    if blocker is not None:
        subject.drop(blocker.key)
    assert (subject._pool.counts().active, subject.idle) == (0, True)


def test_a_step_that_fails_takes_prompts_along() -> None:
    subject = scheduler()
    sequence = subject.add(request("a", (*range(12),)), ROUTER, 1.0)
    subject.admit()
    subject.next_step()
    assert subject.fail_step() == [sequence]
    assert (subject._pool.counts().active, subject.idle) == (0, True)


@given(data=st.data())
def test_any_mixture_gives_each_its_own_text_and_the_pool_back(data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 1 << 30)))
    subject = scheduler(data.draw(st.integers(8, 20)), step_tokens=data.draw(st.integers(1, 16)), sequences=4)
    engine = PaperEngine(BLOCK, model)
    told: dict[RequestKey, list[int]] = {}
    asked: dict[RequestKey, Prefill] = {}
    names = iter(range(1000))
    again = [
        request(f"r{next(names)}", tuple(rng.choices((1, 2), k=rng.randint(1, 20))))
        for _ in range(data.draw(st.integers(1, 8)))
    ]
    for _ in range(600):
        while again and rng.random() < 0.5:
            each = again.pop()
            asked[each.key], told[each.key] = each, []
            subject.add(each, ROUTER, float(next(names)))
        subject.admit()
        for victim in run(subject, engine, told):
            # As the router does: from the start, under another key.
            del told[victim.key]
            again.append(request(f"r{next(names)}", asked.pop(victim.key).token_ids))
        subject._pool.check_integrity()
        if not again and subject.idle and not subject.waiting:
            break
    assert {key: told[key] for key in asked} == {key: text(each.token_ids, 6) for key, each in asked.items()}
    counts = subject._pool.counts()
    assert (counts.active, counts.leaked, subject.waiting) == (0, 0, 0)


def test_forks_share_the_prompt() -> None:
    subject = scheduler()
    forks = (Fork(RequestKey("b", 0), 1), Fork(RequestKey("c", 0), 2))
    sequence = subject.add(request("a", (*range(6),), forks=forks), ROUTER, 0.0)
    subject.admit()
    (chunk,) = chunks_of(subject.next_step().sequences)
    assert [sampling.seed for sampling in chunk.forks] == [1, 2]
    subject.complete_step([Draw(7)])
    subject.begin(sequence, 7, 0.0)
    other = subject.fork(sequence, 1, 9)
    assert (other.token_ids, other.block_table, other.prompt) == ([*range(6), 9], sequence.block_table, None)


def test_what_is_not_for_this_worker_is_refused() -> None:
    mine = request("a", (1, 2))
    assert prefill_refusal(mine, ME, able=True) is None
    refused = prefill_refusal(mine, ME, able=False), prefill_refusal(mine, Peer("decode-0", 2), able=True)
    assert all(error is not None and error.retryable for error in refused)
