"""Speculation on the decode side changes no token, no log-probability and no block; only how many steps it takes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tiny_llama
from oracle import Oracle
from prometheus_client.parser import text_string_to_metric_families
from rack import Rack, rack, until

from decode_worker.speculation import Speculation
from protocol.grammar import Grammar
from protocol.sampling import SamplingParams, TokenLogprobs
from router.front.generation import Generation
from router.front.text import OutputText
from router.tokenizer import Tokenizer

REPEATING = [9, 4, 30, 9, 12, 7, 4, 4, 50, 9, 33] * 3
MAX_TOKENS = 40


@asynccontextmanager
async def speculating(model: Path, speculation: Speculation | None = None, **settings: Any) -> AsyncIterator[Rack]:
    transfer = {"speculation": speculation or Speculation(min_match=1)}
    async with rack(model, decode_transfer=transfer, **settings) as running:
        yield running


def guessed(running: Rack) -> tuple[int, int, int, int]:
    """Drafted, accepted, tokens and turns."""
    loads = [worker.load() for worker in running.decode]
    names = ("draft_tokens", "accepted_tokens", "decode_tokens", "decode_turns")
    drafted, accepted, tokens, turns = (sum(getattr(load, name) for load in loads) for name in names)
    return drafted, accepted, tokens, turns


async def told(running: Rack, prompt: list[int], **sampling: Any) -> tuple[list[int], list[TokenLogprobs], str | None]:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": MAX_TOKENS, **sampling})
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish = None
    async for output in running.service.generate(Generation(token_ids=tuple(prompt), sampling=params)):
        tokens += output.token_ids
        logprobs += output.logprobs
        finish = output.finish_reason
    return tokens, logprobs, finish


@pytest.mark.parametrize(
    "family",
    [
        {},
        {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2},
        {"family": "mistral", "sliding_window": 7},
        {"family": "gemma2", "head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 5.0},
    ],
    ids=["llama", "gqa3", "mistral-window", "gemma2"],
)
async def test_greedy_text_is_transformers_text(family: dict[str, Any], tmp_path: Path) -> None:
    tiny_llama(tmp_path, **family)
    oracle = Oracle(tmp_path)
    rng = random.Random(2)
    noise = [rng.randrange(3, oracle.vocab_size) for _ in range(21)]
    async with speculating(tmp_path, Speculation(tokens=5, min_match=1), engine={"max_batch_tokens": 8}) as running:
        for prompt in (REPEATING, noise, REPEATING[:13]):
            answer = await running.ask(prompt, max_tokens=MAX_TOKENS)
            assert answer.token_ids == oracle.greedy(prompt, MAX_TOKENS)
        drafted, accepted, tokens, turns = guessed(running)
    assert 0 < accepted <= drafted
    assert tokens == turns + accepted == 3 * (MAX_TOKENS - 1)


RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 3},
    "penalties": {
        "temperature": 0.7,
        "seed": 5,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
    },
    "greedy-penalties": {"repetition_penalty": 1.05, "frequency_penalty": 0.05},
    "reward": {"repetition_penalty": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.2, "top_k": 20, "seed": 7},
    "bias": {"logit_bias": ((40, 3.0), (41, -8.0), (9, 2.0)), "temperature": 0.5, "seed": 1},
    "grammar": {"grammar": Grammar("regex", "(the [a-f]+, ){3,}"), "temperature": 0.3, "seed": 2},
    "one-token": {"max_tokens": 1},
    "two-tokens": {"max_tokens": 2},
    "three-tokens": {"max_tokens": 3},
}


async def test_rules_seeds_and_log_probabilities_are_as_without(tiny_llama_dir: Path) -> None:
    async with rack(tiny_llama_dir) as plain, speculating(tiny_llama_dir) as running:
        for name, rules in RULES.items():
            tokens, logprobs, finish = await told(plain, REPEATING, logprobs=3, **rules)
            found = await told(running, REPEATING, logprobs=3, **rules)
            assert (found[0], found[2]) == (tokens, finish), name
            assert len(found[1]) == len(tokens)
            for one, other in zip(found[1], logprobs, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4), name
                assert dict(one.top) == pytest.approx(dict(other.top), abs=1e-4), name
        drafted, accepted, _, _ = guessed(running)
    assert 0 < accepted < drafted


async def test_stop_tokens_end_a_text_where_they_would_without(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    truth = tiny_oracle.greedy(REPEATING, MAX_TOKENS)
    async with speculating(tiny_llama_dir) as running:
        for stop in sorted(set(truth)):
            end = truth.index(stop) + 1
            tokens, _, finish = await told(running, REPEATING, stop_token_ids=(stop,))
            assert (tokens, finish) == (truth[:end], "stop")
        early = truth[len(truth) // 2]
        least = truth.index(early) + 2
        plainly = await told(running, REPEATING, stop_token_ids=(early,), min_tokens=least)
        assert len(plainly[0]) > least
        assert early not in plainly[0][:least]
        assert guessed(running)[1] > 0


async def test_stop_strings_are_found_in_several_tokens_at_once(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    tokenizer = Tokenizer(tiny_llama_dir)
    truth = tiny_oracle.greedy(REPEATING, MAX_TOKENS)
    text = tokenizer.decode(truth)
    async with speculating(tiny_llama_dir) as running:
        for at in range(4, len(text) - 2, 5):
            stop = text[at : at + 2]
            expected = text[: text.index(stop)]
            decoder, parts = OutputText(tokenizer, (stop,), 0), []
            params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
            outputs = running.service.generate(Generation(token_ids=tuple(REPEATING), sampling=params))
            async for output in outputs:
                piece = decoder.push(output)
                parts.append(piece.text)
                if piece.finish_reason is not None:
                    break
            await outputs.aclose()
            assert (piece.finish_reason, "".join(parts)) == ("stop", expected)


@pytest.mark.parametrize("emitted", [1, 6, 17])
async def test_a_retry_goes_on_with_the_same_text(emitted: int, tiny_llama_dir: Path) -> None:
    rules: dict[str, Any] = {"temperature": 0.5, "seed": 5, "repetition_penalty": 0.7, "frequency_penalty": 0.1}
    async with speculating(tiny_llama_dir, decode=2) as running:
        undisturbed, _, _ = await told(running, REPEATING, **rules)
        params = SamplingParams(max_tokens=MAX_TOKENS, **rules)
        found: list[int] = []
        disturbed, attempts = False, 0
        async for output in running.service.generate(Generation(token_ids=tuple(REPEATING), sampling=params)):
            found += output.token_ids
            attempts = output.report.attempts if output.report else attempts
            if len(found) >= emitted and not disturbed:
                disturbed = True
                for worker in running.decode:
                    for key in worker._scheduler.asked_by(running.service._hub.me):  # type: ignore[union-attr]
                        worker._preempt(worker._scheduler.drop(key))  # type: ignore[arg-type]
        assert guessed(running)[1] > 0
    assert (found, attempts) == (undisturbed, 2)


async def test_a_full_pool_preempts_and_cancels_leave_nothing(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    rng = random.Random(4)
    prompts = [[rng.randrange(3, 9) for _ in range(rng.randrange(4, 24))] for _ in range(8)]

    async def cancelled(prompt: list[int], after: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        outputs = running.service.generate(Generation(token_ids=tuple(prompt), sampling=params))
        seen = 0
        async for output in outputs:
            seen += len(output.token_ids)
            if seen >= after:
                break
        await outputs.aclose()

    async with speculating(tiny_llama_dir, decode_engine={"num_blocks": 20, "max_sequences": 10}) as running:
        answers, _ = await asyncio.gather(
            asyncio.gather(*(running.ask(prompt, max_tokens=MAX_TOKENS) for prompt in prompts)),
            asyncio.gather(*(cancelled(prompt, after) for after, prompt in enumerate(prompts[:4], 1))),
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == tiny_oracle.greedy(prompt, MAX_TOKENS)
        load = running.decode[0].load()
        assert load.preemptions + load.swaps > 0, "the pool was to be too small"
        assert guessed(running)[1] > 0


async def test_what_was_drafted_and_accepted_is_exported(tiny_llama_dir: Path) -> None:
    async with speculating(tiny_llama_dir) as running:
        await running.ask(REPEATING, max_tokens=MAX_TOKENS)
        drafted, accepted, tokens, turns = guessed(running)
        expected = {
            "draft_tokens": drafted,
            "accepted_tokens": accepted,
            "decode_tokens": tokens,
            "decode_turns": turns,
        }

        def exported() -> dict[str, float]:
            families = text_string_to_metric_families(running.service.metrics().decode())
            samples = {
                sample.name: sample.value
                for family in families
                for sample in family.samples
                if sample.labels.get("role") == "decode"
            }
            return {name: samples.get(f"kvferry_{name}_total", 0.0) for name in expected}

        await until(lambda: exported() == expected, "the next heartbeat")
        assert drafted > 0
