"""Requests over HTTP to a real router with real workers: what one client sends alike is kept apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from oracle import Oracle
from rack import MODEL, until
from test_handoff_faults import prompt_of
from tokenizers import Tokenizer

from decode_worker.config import DecodeConfig
from decode_worker.worker import DecodeWorker
from engine.config import EngineConfig
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker
from router.config import RouterConfig
from router.server import RouterServer

TOKENS = 8


class Stage:
    """One router with its front, one worker of each kind, and a client."""

    def __init__(self, client: httpx.AsyncClient, workers: tuple[PrefillWorker, DecodeWorker], model: Path) -> None:
        self._client = client
        self._workers = workers
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids)

    async def complete(self, prompt: list[int], headers: dict[str, str] | None = None, **params: int) -> httpx.Response:
        return await self._post("/v1/completions", {"prompt": prompt, **params}, headers or {})

    async def ask(self, path: str, fields: dict[str, object]) -> dict[str, Any]:
        content: dict[str, Any] = (await self._post(path, fields, {})).json()
        return content

    async def _post(self, path: str, fields: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        body = {"model": MODEL, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **fields}
        answer = await self._client.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    def prefilled(self) -> int:
        """Prompt tokens that were computed, not found."""
        return self._workers[0].load().prefill_tokens

    def at_baseline(self) -> bool:
        for worker in self._workers:
            load = worker.load()
            if load.pool.free + load.pool.cached + load.pool.reserved != load.pool.total or load.running:
                return False
        return True


@pytest.fixture
async def stage(tiny_llama_dir: Path, tiny_oracle: Oracle) -> AsyncIterator[Stage]:
    server = RouterServer(RouterConfig(model=MODEL, tokenizer=str(tiny_llama_dir), port=0, worker_timeout=15.0))
    await server.start()
    engine = EngineConfig(
        model=str(tiny_llama_dir), dtype="float32", num_blocks=65, block_size=4, max_batch_tokens=16, threads=1
    )
    hubs = (server.hub_endpoint,)
    workers = (
        PrefillWorker(PrefillConfig(name="prefill-0", model_name=MODEL, engine=engine, routers=hubs)),
        DecodeWorker(DecodeConfig(name="decode-0", model_name=MODEL, engine=engine, routers=hubs)),
    )
    try:
        for worker in workers:
            await worker.start()
        await until(lambda: server.service.health().ready, "every heartbeat")
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60.0) as client:
            made = Stage(client, workers, tiny_llama_dir)
            yield made
            await until(made.at_baseline, "the baseline of every pool")
    finally:
        await server.stop()
        for worker in workers:
            await worker.stop()


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
        answer = await stage.ask(path, {**asked, "cache_salt": salt})
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        choice = answer["choices"][0]
        texts.append(choice["text"] if "text" in choice else choice["message"]["content"])
    assert cached[:3] == [0, 0, 0], "one salt's blocks were found under another"
    assert min(cached[3:]) > 0, "the same salt finds its own"
    assert len(set(texts)) == 1
