"""Penalties, biases and log-probabilities are the same on both sides of the handoff, and after a retry."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracle import Oracle
from rack import rack

from protocol.sampling import SamplingParams, TokenLogprobs
from router.front.generation import Generation

PROMPT = [9, 4, 30, 9, 12, 7, 4, 4, 50, 9, 33]
MAX_TOKENS = 24


def penalised(oracle: Oracle, *, repetition: float, bias: dict[int, float]) -> list[int]:
    ids = torch.tensor([PROMPT])
    output = oracle.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        repetition_penalty=repetition,
        sequence_bias={(token,): value for token, value in bias.items()} or None,
    )
    return output[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(
    ("repetition", "bias"),
    [(1.0, {}), (1.7, {}), (0.6, {}), (1.0, {40: 3.0, 41: -8.0}), (1.4, {5: 2.5, 100: 2.0})],
    ids=["plain", "penalty", "reward", "bias", "both"],
)
async def test_greedy_text_under_rules_is_transformers_text(
    repetition: float, bias: dict[int, float], tiny_llama_dir: Path, tiny_oracle: Oracle
) -> None:
    expected = penalised(tiny_oracle, repetition=repetition, bias=bias)
    async with rack(tiny_llama_dir) as running:
        answer = await running.ask(
            PROMPT, max_tokens=MAX_TOKENS, repetition_penalty=repetition, logit_bias=tuple(bias.items())
        )
    assert answer.token_ids == expected


@pytest.mark.parametrize("emitted", [1, 5, 11])
async def test_a_retry_goes_on_under_the_same_rules(emitted: int, tiny_llama_dir: Path) -> None:
    rules = {
        "temperature": 1.0,
        "seed": 5,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.9,
        "min_p": 0.01,
    }
    async with rack(tiny_llama_dir, decode=2) as running:
        undisturbed = await running.ask(PROMPT, max_tokens=MAX_TOKENS, **rules)
        params = SamplingParams(max_tokens=MAX_TOKENS, **rules)  # type: ignore[arg-type]
        generation = Generation(token_ids=tuple(PROMPT), sampling=params)
        found: list[int] = []
        attempts = 0
        async for output in running.service.generate(generation):
            found += output.token_ids
            attempts = output.report.attempts if output.report else attempts
            if len(found) >= emitted and attempts < 2:
                for worker in running.decode:
                    for key in worker._scheduler.asked_by(running.service._hub.me):  # type: ignore[union-attr]
                        worker._preempt(worker._scheduler.drop(key))  # type: ignore[arg-type]
                attempts = 2
    assert found == undisturbed.token_ids


async def test_log_probabilities_of_the_first_token_and_of_the_others(
    tiny_llama_dir: Path, tiny_oracle: Oracle
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=9, logprobs=3, repetition_penalty=1.5)
    told: list[TokenLogprobs] = []
    tokens: list[int] = []
    async with rack(tiny_llama_dir) as running:
        async for output in running.service.generate(Generation(token_ids=tuple(PROMPT), sampling=params)):
            tokens += output.token_ids
            told += output.logprobs
    with torch.inference_mode():
        logits = tiny_oracle.model(torch.tensor([PROMPT + tokens[:-1]])).logits[0, len(PROMPT) - 1 :]
    expected = torch.log_softmax(logits.float(), -1)
    assert len(told) == len(tokens) == 9
    for line, token, value in zip(expected, tokens, told, strict=True):
        assert value.logprob == pytest.approx(float(line[token]), abs=1e-3)
        best = torch.topk(line, 3)
        assert [number for number, _ in value.top] == best.indices.tolist()
        assert [logprob for _, logprob in value.top] == pytest.approx(best.values.tolist(), abs=1e-3)
