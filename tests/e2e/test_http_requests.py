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
    assert stage.prefilled() == len(prompt), "prefilled more than once"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_another_tenants_salt_hits_nothing(stage: Stage, path: str) -> None:
    content = "the ferry carries the blocks across the water, and the blocks arrive in order"
    asked: dict[str, object] = {"prompt": content} if path == "/v1/completions" else {}
    if not asked:
        asked["messages"] = [{"role": "user", "content": content}]
    cached, texts = [], []
    for salt in ("", "a", "b", "a", "b", ""):
        answer = (await stage.post(path, {**asked, "cache_salt": salt})).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        choice = answer["choices"][0]
        texts.append(choice["text"] if "text" in choice else choice["message"]["content"])
    assert cached[:3] == [0, 0, 0], "one salt's blocks were found under another"
    assert min(cached[3:]) > 0, "the same salt finds its own"
    assert len(set(texts)) == 1
