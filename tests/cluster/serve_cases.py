"""A router and workers without a model, in this process, and a plain server of the test's own words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from cluster.bench.router.null_worker import NullWorker
from cluster.bench.serve.measure import ServeOptions
from cluster.bench.serve.server import Address
from cluster.bench.traces.options import TraceOptions
from router.client import AsyncClient
from router.config import RouterConfig
from router.server import RouterServer
from router.tokenizer import Tokenizer

VOCABULARY = (10, 120)
SAYING = " the ferry carries the blocks"


@asynccontextmanager
async def routed(model: Path, *, step: float = 0.0, **config: Any) -> AsyncIterator[str]:
    """The URL of a router before one prefill and one decode worker that compute nothing."""
    tokenizer = Tokenizer(model)
    text = [token for token in tokenizer.encode(SAYING, add_special_tokens=False) if not tokenizer.is_silent(token)]
    server = RouterServer(
        RouterConfig(model=model.name, tokenizer=str(model), port=0, worker_timeout=30.0, stop_grace=0.1, **config)
    )
    await server.start()
    workers = [
        NullWorker(role, model.name, tokenizer.vocab_size, server.hub_endpoint, text) for role in ("prefill", "decode")
    ]
    try:
        for worker in workers:
            worker.step = step
            worker.start()
        async with AsyncClient(server.url) as client, asyncio.timeout(60.0):
            while not (await client.health()).ready:  # noqa: ASYNC110 -- no event tells of it
                await asyncio.sleep(0.005)
        yield server.url
    finally:
        for worker in workers:
            await worker.close()
        await server.stop()


def options(*urls: str, **changed: Any) -> ServeOptions:
    """A short run against these."""
    trace = {"name": "poisson", "requests": 12, "rate": 200.0, "prompt_tokens": 20, "output_tokens": 4}
    trace |= {name: changed.pop(name) for name in [*changed] if name in TraceOptions.__dataclass_fields__}
    return ServeOptions(
        servers=tuple(Address(url) for url in urls),
        trace=TraceOptions(**trace),  # type: ignore[arg-type]
        **{"token_ids": VOCABULARY, "warm": 1, **changed},
    )


def event(text: str | None, reason: str | None = None, **more: Any) -> bytes:
    """One event, as vLLM writes it."""
    choices = [] if text is None else [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]
    body = {"id": "cmpl-1", "object": "text_completion", "choices": choices, "usage": None, **more}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def usage(prompt: int, output: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}}


DONE = b"data: [DONE]\n\n"

Answer = tuple[int, Sequence[bytes]]


@asynccontextmanager
async def speaking(answer: Callable[[dict[str, Any]], Answer], *, limit: int | None = 512) -> AsyncIterator[str]:
    """A server that is none of ours: it names a model ``m``, and answers a completion with what ``answer`` has."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET /v1/models "):
            card = {"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": limit}
            status, parts = 200, [msgspec.json.encode({"object": "list", "data": [card]})]
        else:
            length = next(
                int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length")
            )
            status, parts = answer(msgspec.json.decode(await reader.readexactly(length)))
        writer.write(f"HTTP/1.1 {status} x\r\nconnection: close\r\n\r\n".encode())
        for part in parts:
            writer.write(part)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield "http://{}:{}".format(*server.sockets[0].getsockname()[:2])
    finally:
        server.close()
        await server.wait_closed()
