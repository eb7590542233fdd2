"""One router with its front, one worker of each kind, and a client, all on the test's loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from rack import MODEL, until
from tokenizers import Tokenizer

from decode_worker.config import DecodeConfig
from decode_worker.worker import DecodeWorker
from engine.config import EngineConfig
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker
from protocol.tracing.config import TracingConfig
from router.config import RouterConfig
from router.server import RouterServer

TOKENS = 8


class Stage:
    """What a test speaks to.

    Attributes:
        url: of the router.
        client: of its front.
        prefill, decode: the workers.
    """

    def __init__(
        self, url: str, client: httpx.AsyncClient, prefill: PrefillWorker, decode: DecodeWorker, tokenizer: Path
    ) -> None:
        self.url = url
        self.client = client
        self.prefill, self.decode = prefill, decode
        self._tokenizer = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))

    def text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids)

    async def complete(self, prompt: Any, headers: dict[str, str] | None = None, **params: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"prompt": prompt, **params}, headers)

    async def post(self, path: str, fields: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
        body = {"model": MODEL, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **fields}
        answer = await self.client.post(path, json=body, headers=headers or {})
        assert answer.status_code == 200, answer.text
        return answer

    def prefilled(self) -> int:
        """Prompt tokens that were computed, not found."""
        return self.prefill.load().prefill_tokens

    def at_baseline(self) -> bool:
        for worker in (self.prefill, self.decode):
            load = worker.load()
            if load.pool.free + load.pool.cached + load.pool.reserved != load.pool.total or load.running:
                return False
        return True


@asynccontextmanager
async def http_stage(
    model: Path,
    tokenizer: Path | None = None,
    *,
    max_model_len: int | None = None,
    tracing: TracingConfig | None = None,
    **router: Any,
) -> AsyncIterator[Stage]:
    """Bring it up, and check at the end that every pool went back to its baseline."""
    tokenizer = tokenizer or model
    front: dict[str, Any] = {"port": 0, "worker_timeout": 15.0, "tracing": tracing, **router}
    server = RouterServer(RouterConfig(model=MODEL, tokenizer=str(tokenizer), **front))
    await server.start()
    engine = EngineConfig(
        model=str(model),
        dtype="float32",
        num_blocks=65,
        block_size=4,
        max_batch_tokens=16,
        max_model_len=max_model_len,
        threads=1,
    )
    common: dict[str, Any] = {
        "model_name": MODEL,
        "engine": engine,
        "routers": (server.hub_endpoint,),
        "tracing": tracing,
    }
    prefill = PrefillWorker(PrefillConfig(name="prefill-0", **common))
    decode = DecodeWorker(DecodeConfig(name="decode-0", **common))
    try:
        for worker in (prefill, decode):
            await worker.start()
        await until(lambda: server.service.health().ready, "every heartbeat")
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60.0) as client:
            made = Stage(server.url, client, prefill, decode, tokenizer)
            yield made
            await until(made.at_baseline, "the baseline of every pool")
    finally:
        await server.stop()
        for worker in (prefill, decode):
            await worker.stop()
