"""Log-probabilities of prompts over the handoff: transformers' own, each once, whatever is cached and whoever fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from oracle import Oracle
from rack import Rack, rack
from test_handoff_faults import prompt_of

from engine.batch import Chunk, Draw
from engine.layer_watch import LayerWatch
from prefill_worker.worker import PrefillWorker
from protocol.errors import EngineFailure
from protocol.prompt_logprobs import LogprobRow
from protocol.sampling import SamplingParams
from router.front.generation import Generation, GenerationReport

TOKENS = 6
CHUNK = 16
"""Tokens of a step on the rack."""


class Told:
    """What one request gave."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.rows: list[LogprobRow] = []
        self.report: GenerationReport | None = None


async def ask(running: Rack, prompt: Sequence[int], alternatives: int | None, *, preempt_at: int = 0) -> Told:
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    generation = Generation(token_ids=tuple(prompt), sampling=sampling, prompt_logprobs=alternatives)
    told = Told()
    async for output in running.service.generate(generation):
        told.token_ids += output.token_ids
        told.rows += [row for table in output.prompt_logprobs for row in table.rows()]
        told.report = output.report or told.report
        if preempt_at and len(told.token_ids) >= preempt_at:
            preempt_at = 0
            for worker in running.decode:
                for key in worker._scheduler.asked_by(running.service._hub.me):  # type: ignore[union-attr]
                    worker._preempt(worker._scheduler.drop(key))  # type: ignore[arg-type]
    return told


def check(oracle: Oracle, prompt: Sequence[int], told: Told, alternatives: int) -> None:
    assert told.token_ids == oracle.greedy(prompt, TOKENS)
    with torch.inference_mode():
        truth = torch.log_softmax(oracle.model(torch.tensor([list(prompt)])).logits[0].float(), -1)
    assert len(told.rows) == len(prompt) - 1
    for line, token, row in zip(truth, prompt[1:], told.rows, strict=False):
        assert row.logprob == pytest.approx(float(line[token]), abs=1e-3)
        assert row.rank == 1 + int((line > line[token]).sum())
        assert [number for number, _ in row.top] == torch.topk(line, alternatives).indices.tolist()


async def test_at_every_border_of_block_and_chunk_cold_and_cached(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    async with rack(tiny_llama_dir, engine={"num_blocks": 129}) as running:
        for length in (1, 2, 4, 5, CHUNK, CHUNK + 1, 2 * CHUNK + 3):
            prompt = prompt_of(tiny_oracle, length, length)
            check(tiny_oracle, prompt, await ask(running, prompt, 3), 3)
            # Whoever does not ask still finds the prompt in the caches, and whoever asks does not look.
            plain = await ask(running, prompt, None)
            assert not plain.rows
            assert plain.report is not None
            assert plain.report.cached_tokens == (length - 1) // 4 * 4
            again = await ask(running, prompt, 2)
            check(tiny_oracle, prompt, again, 2)
            assert again.report is not None
            assert again.report.cached_tokens == 0


async def test_several_at_once_in_one_step(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    asked = [(prompt_of(tiny_oracle, length, length), wish) for length, wish in ((5, 1), (9, None), (7, 0), (22, 4))]
    async with rack(tiny_llama_dir, engine={"max_batch_tokens": 24}) as running:
        answers = await asyncio.gather(*(ask(running, prompt, wish) for prompt, wish in asked))
    for (prompt, wish), told in zip(asked, answers, strict=True):
        if wish is None:
            assert (told.token_ids, told.rows) == (tiny_oracle.greedy(prompt, TOKENS), [])
        else:
            check(tiny_oracle, prompt, told, wish)


def fail_in_step(worker: PrefillWorker, number: int) -> None:
    """Let the ``number``-th step of ``worker`` fail, and no other."""
    execute = worker._stepper.execute
    steps = 0

    async def failing(chunks: Sequence[Chunk], *watch: LayerWatch) -> Sequence[Draw | None]:
        nonlocal steps
        steps += 1
        if steps == number:
            raise EngineFailure("this step fails")
        return await execute(chunks, *watch)

    worker._stepper.execute = failing  # type: ignore[method-assign]


@pytest.mark.parametrize("step", [1, 2, 3])
async def test_a_retry_in_mid_prompt_loses_none_and_doubles_none(
    step: int, tiny_llama_dir: Path, tiny_oracle: Oracle
) -> None:
    prompt = prompt_of(tiny_oracle, 2 * CHUNK + 9)
    async with rack(tiny_llama_dir) as running:
        (worker,) = running.prefill
        fail_in_step(worker, step)
        told = await ask(running, prompt, 2)
        check(tiny_oracle, prompt, told, 2)
        assert told.report is not None
        assert told.report.attempts == 2
        # It went on where the first attempt broke off: what that had computed and told is taken from the cache.
        assert told.report.cached_tokens == (step - 1) * CHUNK
        assert worker.load().prefill_tokens == len(prompt)


async def test_a_retry_after_the_first_token_tells_nothing_again(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    prompt = prompt_of(tiny_oracle, CHUNK + 6)
    async with rack(tiny_llama_dir) as running:
        told = await ask(running, prompt, 2, preempt_at=3)
        check(tiny_oracle, prompt, told, 2)
        assert told.report is not None
        assert told.report.attempts == 2
        # The second attempt, which nobody wants to hear of the prompt from, found it in the cache.
        assert running.prefill[0].load().cached_tokens >= CHUNK
