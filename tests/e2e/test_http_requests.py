"""Requests over HTTP to a real router with real workers: what one client sends alike is kept apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from http_stage import TOKENS, Stage, http_stage
from oracle import Oracle
from test_handoff_faults import prompt_of


@pytest.fixture
async def stage(tiny_llama_dir: Path) -> AsyncIterator[Stage]:
    async with http_stage(tiny_llama_dir) as made:
        yield made


async def test_live_requests_with_one_client_request_id(stage: Stage, tiny_oracle: Oracle) -> None:
    asked = [prompt_of(tiny_oracle, length, length) for length in (9, 22, 41)]
    headers = {"x-request-id": "the-same-for-all"}
    answers = await asyncio.gather(*(stage.complete(prompt, headers) for prompt in asked))
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer.json()["choices"][0]["text"] == stage.text(tiny_oracle.greedy(prompt, TOKENS))
    # The cluster goes by ids of its own.
    assert len({answer.headers["x-request-id"] for answer in answers}) == len(asked)
    assert {answer.headers["x-client-request-id"] for answer in answers} == {"the-same-for-all"}


async def test_three_continuations_of_one_prompt(stage: Stage, tiny_oracle: Oracle) -> None:
    prompt = prompt_of(tiny_oracle, 30)
    answer = (await stage.complete(prompt, n=3)).json()
    truth = stage.text(tiny_oracle.greedy(prompt, TOKENS))
    assert [choice["text"] for choice in answer["choices"]] == [truth] * 3
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (len(prompt), 3 * TOKENS)
    # Prefilled once: the others found all but the last block, for whose logits they computed it again.
    assert stage.prefilled() == len(prompt) + 2 * (len(prompt) - len(prompt) // 4 * 4)
