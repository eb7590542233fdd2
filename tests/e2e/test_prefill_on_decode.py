"""Decode workers that prefill themselves: transformers' text, no lease, and streams that outlive prefill workers."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from pathlib import Path

import pytest
from checkpoints import tiny_llama
from oracle import Oracle
from pace import allowed
from prometheus_client.parser import text_string_to_metric_families
from rack import Answer, Rack, rack, until
from test_handoff_faults import Gate, prompt_of
from test_handoff_forks import ask_apart, ask_together, copies
from test_handoff_prompt_logprobs import ask as ask_scored
from test_handoff_prompt_logprobs import check as check_scores

from decode_worker.speculation import Speculation
from protocol.sampling import SamplingParams
from router.front.generation import Generation

BLOCK = 4
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 30, 47)
ALWAYS: dict[str, object] = {"local_prefill": "always"}


def counted(running: Rack, name: str) -> dict[str, float]:
    """Samples of one counter of the router, by reason."""
    families = text_string_to_metric_families(running.service.metrics().decode())
    samples = [sample for family in families for sample in family.samples if sample.name == f"{name}_total"]
    return {sample.labels.get("reason", ""): sample.value for sample in samples}


@pytest.mark.parametrize(
    "engine",
    [{}, {"order": "HND", "max_batch_tokens": 5}, {"block_size": 16, "max_batch_tokens": 512}],
    ids=["nhd", "hnd-small-chunks", "one-chunk"],
)
async def test_greedy_text_in_mixed_steps(tiny_llama_dir: Path, tiny_oracle: Oracle, engine: dict[str, object]) -> None:
    asked = [prompt_of(tiny_oracle, length, length) for length in LENGTHS]
    async with rack(tiny_llama_dir, prefill=0, engine={"num_blocks": 129, **engine}) as running:
        # All at once: prompts in chunks beside the tokens of those that are through. Then from the prefix cache.
        for again in (False, True):
            answers = await asyncio.gather(*map(running.ask, asked))
            for prompt, answer in zip(asked, answers, strict=True):
                assert answer.token_ids == tiny_oracle.greedy(prompt, 12), f"prompt of {len(prompt)}"
                assert answer.report is not None
                assert (answer.report.local_prefill, answer.report.kv_blocks) == ("no_prefill_worker", 0)
                assert bool(answer.report.cached_tokens) == (
                    again and len(prompt) > int(engine.get("block_size", BLOCK))
                )  # type: ignore[call-overload]
        load = running.decode[0].load()
        assert load.prefill_tokens + load.cached_tokens == 2 * sum(LENGTHS)
        assert load.cached_tokens >= BLOCK
        assert counted(running, "kvferry_local_prefills") == {"no_prefill_worker": 2.0 * len(LENGTHS)}
        assert counted(running, "kvferry_handoffs") == counted(running, "kvferry_remote_prefills") == {"": 0.0}
        assert 0 < load.step_gaps.count < load.steps


async def test_both_ways_give_one_text_and_short_prompts_stay(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    router: dict[str, object] = {"local_prefill": "short", "local_prefill_tokens": 9}
    sampling: dict[str, object] = {"temperature": 0.9, "seed": 5, "logprobs": 2, "repetition_penalty": 1.3}
    async with rack(tiny_llama_dir, router=router) as running, rack(tiny_llama_dir, router=ALWAYS) as local:
        for length in (3, 9, 10, 31):
            prompt = prompt_of(tiny_oracle, length, length)
            for options in ({}, sampling, {"max_tokens": 1}):
                one, other = await running.ask(prompt, **options), await local.ask(prompt, **options)
                assert one.token_ids == other.token_ids
                assert one.report is not None
                assert one.report.local_prefill == ("short_prompt" if length <= 9 else "")
        assert counted(running, "kvferry_local_prefills") == {"short_prompt": 6.0}
        assert not local.prefill[0].load().prefill_tokens


@pytest.mark.parametrize(
    "case",
    [
        {"model": {"family": "mistral", "sliding_window": 9}},
        {"model": {"family": "gemma2", "head_dim": 16, "sliding_window": 7}},
        {"decode": {"speculation": Speculation(tokens=4, min_match=1)}},
        {"decode": {"step_tokens": 3}},
    ],
    ids=["window", "gemma2", "speculation", "a-block-at-a-time"],
)
async def test_whatever_the_model_and_the_steps(tmp_path: Path, case: dict[str, dict[str, object]]) -> None:
    tiny_llama(tmp_path, **case.get("model", {}))
    oracle = Oracle(tmp_path)
    rng = random.Random(1)
    asked = [[rng.randrange(3, 9) for _ in range(length)] for length in (2, 21, 43)]
    settings = case.get("decode", {})
    async with rack(tmp_path, prefill=0, decode_transfer=settings, engine={"max_batch_tokens": 8}) as running:
        answers = await asyncio.gather(*(running.ask(prompt, max_tokens=30) for prompt in asked))
        for prompt, answer in zip(asked, answers, strict=True):
            assert answer.token_ids == oracle.greedy(prompt, 30)
        if "speculation" in settings:
            assert running.decode[0].load().accepted_tokens > 0


async def test_an_eight_bit_cache_gives_what_the_handoff_gives(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    engine: dict[str, object] = {"kv_cache_dtype": "float8_e4m3"}
    prompt = prompt_of(tiny_oracle, 37)
    async with rack(tiny_llama_dir, engine=engine) as far, rack(tiny_llama_dir, prefill=0, engine=engine) as here:
        assert (await far.ask(prompt)).token_ids == (await here.ask(prompt)).token_ids


async def test_choices_share_the_prompt_and_scores_are_told(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    async with rack(tiny_llama_dir, prefill=0, engine={"num_blocks": 129}) as running:
        prompt = tuple(prompt_of(tiny_oracle, 2 * BLOCK + 2, 3))
        together = await ask_together(running, copies(prompt, 5))
        assert running.decode[0].load().prefill_tokens == len(prompt), "it was computed once"
        assert together == await ask_apart(running, copies(prompt, 5))
        assert await ask_together(running, copies(prompt, 3, max_tokens=1)) == [[tokens[0]] for tokens in together[:3]]
        for length in (5, 33):
            scored = prompt_of(tiny_oracle, length, length)
            check_scores(tiny_oracle, scored, await ask_scored(running, scored, 3), 3)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 7}], ids=["greedy", "seeded"])
async def test_streams_outlive_all_prefill_workers(
    tiny_llama_dir: Path, tiny_oracle: Oracle, sampling: dict[str, object]
) -> None:
    prompt = prompt_of(tiny_oracle, 14)
    async with rack(tiny_llama_dir, prefill=2, decode=2, router={"worker_timeout": 1.0}) as running:
        truth = (await running.ask(prompt, max_tokens=24, **sampling)).token_ids
        gates = [Gate(worker, open_for=5) for worker in running.decode]
        task = asyncio.create_task(running.ask(prompt, max_tokens=24, **sampling))
        await until(lambda: any(gate.held for gate in gates), "a stream in mid-way")
        for worker in running.prefill:
            await worker.stop()
        running.prefill.clear()
        # And now the one that decodes it: who is left must prefill what there is of it.
        dead = running.decode.pop(next(index for index, gate in enumerate(gates) if gate.held))
        await dead.stop()
        for gate in gates:
            gate.open()
        answer = await task
        assert answer.token_ids == truth
        assert answer.report is not None
        assert (answer.report.attempts, answer.report.local_prefill) == (2, "no_prefill_worker")
        assert running.service.health().ready


async def test_what_a_step_gave_goes_out_while_the_next_one_computes(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    prompt = prompt_of(tiny_oracle, 9)
    async with rack(tiny_llama_dir, prefill=0) as running:
        # A step for the prompt and two tokens of decode; the next step stands still.
        gate = Gate(running.decode[0], open_for=3)
        sampling = SamplingParams(temperature=0.0, max_tokens=12)
        seen: list[int] = []
        async with aclosing(running.service.generate(Generation(tuple(prompt), sampling))) as outputs:
            while len(seen) < 3:
                seen += (await asyncio.wait_for(anext(outputs), allowed(10.0))).token_ids
        assert seen == tiny_oracle.greedy(prompt, 12)[:3]
        await until(lambda: gate.held, "the step that stands still")
        gate.open()


async def test_full_pools_preempt_and_the_text_stays(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    engine: dict[str, object] = {"num_blocks": 18, "max_model_len": 64}
    asked = [prompt_of(tiny_oracle, length, length) for length in (9, 21, 30, 14)]
    for preemption in ("recompute", "swap"):
        settings: dict[str, object] = {"preemption": preemption}
        async with rack(tiny_llama_dir, prefill=0, engine=engine, decode_transfer=settings) as running:
            answers = await asyncio.gather(*(running.ask(prompt, max_tokens=25) for prompt in asked))
            for prompt, answer in zip(asked, answers, strict=True):
                assert answer.token_ids == tiny_oracle.greedy(prompt, 25)
            load = running.decode[0].load()
            assert load.preemptions + load.swaps > 0, "the pool was never full"
            # Who makes room has told all before: the router hears of no attempt that is over.
            assert counted(running, "kvferry_late_messages") == {"": 0.0}


@pytest.mark.parametrize("stage", ["waiting", "first chunk", "last chunk", "decoding"])
async def test_cancel_at_each_stage(tiny_llama_dir: Path, tiny_oracle: Oracle, stage: str) -> None:
    async with rack(tiny_llama_dir, prefill=0, engine={"max_sequences": 1}) as running:
        (worker,) = running.decode
        gate = Gate(worker, open_for={"waiting": 0, "first chunk": 0, "last chunk": 2, "decoding": 4}[stage])
        others: list[asyncio.Task[Answer]] = []
        if stage == "waiting":
            others.append(asyncio.create_task(running.ask(prompt_of(tiny_oracle, 9, 5))))
            await until(lambda: gate.held, "the other request in its step")
        task = asyncio.create_task(running.ask(prompt_of(tiny_oracle, 41)))
        await until(lambda: worker.load().waiting if others else gate.held, f"the stage {stage!r}")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        gate.open()
        await asyncio.gather(*others)
        await running.settle()
        prompt = prompt_of(tiny_oracle, 11, 1)
        assert (await running.ask(prompt)).token_ids == tiny_oracle.greedy(prompt, 12)


async def test_a_worker_that_is_told_so_computes_no_prompt(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    prompt = prompt_of(tiny_oracle, 11)
    unwilling: dict[str, object] = {"local_prefill": False}
    async with rack(tiny_llama_dir, router=ALWAYS, decode_transfer=unwilling) as running:
        answer = await running.ask(prompt)
        assert answer.token_ids == tiny_oracle.greedy(prompt, 12)
        assert answer.report is not None
        assert answer.report.local_prefill == ""
