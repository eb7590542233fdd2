"""What a client may send beside a request's body is bounded, and a client that leaves is noticed whatever it sent."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from pace import allowed
from rack import MODEL, until
from test_handoff_faults import Gate

from decode_worker.config import DecodeConfig
from decode_worker.worker import DecodeWorker
from engine.config import EngineConfig
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker
from router.config import RouterConfig
from router.server import RouterServer

MUCH = 8 << 20
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def address_of(server: RouterServer) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    return host, int(port)


async def pour(writer: asyncio.StreamWriter, piece: bytes) -> None:
    """Send ``MUCH`` bytes, as fast as they are taken."""
    for _ in range(MUCH // len(piece)):
        writer.write(piece)
        await asyncio.wait_for(writer.drain(), allowed(10.0))
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET /health HTTP/1.1\r\n", b"X: y\r\n"),
        (b"GET /health HTTP/1.1\r\nX: ", b"a"),
        (b"GET /", b"a"),
        (CHUNKED + b"0\r\n", b"X: y\r\n"),
        (CHUNKED + b"1;", b"a"),
    ],
    ids=["many headers", "one header", "the path", "trailers", "a chunk's extension"],
)
async def test_a_head_without_an_end_is_cut_off(tiny_llama_dir: Path, begin: bytes, more: bytes) -> None:
    server = RouterServer(RouterConfig(model=MODEL, tokenizer=str(tiny_llama_dir), port=0))
    await server.start()
    try:
        reader, writer = await asyncio.open_connection(*address_of(server))
        writer.write(begin)
        with pytest.raises(ConnectionError):
            await pour(writer, more * ((64 << 10) // len(more)))
        writer.close()
        reader, writer = await asyncio.open_connection(*address_of(server))
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
    finally:
        await server.stop()


async def test_a_client_that_leaves_is_noticed_with_a_further_request_under_way(tiny_llama_dir: Path) -> None:
    server = RouterServer(RouterConfig(model=MODEL, tokenizer=str(tiny_llama_dir), port=0, worker_timeout=15.0))
    await server.start()
    engine = EngineConfig(model=str(tiny_llama_dir), dtype="float32", num_blocks=65, block_size=4, threads=1)
    hubs = (server.hub_endpoint,)
    prefill = PrefillWorker(PrefillConfig(name="prefill-0", model_name=MODEL, engine=engine, routers=hubs))
    decode = DecodeWorker(DecodeConfig(name="decode-0", model_name=MODEL, engine=engine, routers=hubs))
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 60, "temperature": 0}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    try:
        await prefill.start()
        await decode.start()
        await until(lambda: server.service.health().ready, "both workers")
        gate = Gate(decode, open_for=1)
        _, writer = await asyncio.open_connection(*address_of(server))
        writer.write((head + body) * 2)
        await until(lambda: gate.held, "a stream in mid-way")
        writer.close()
        await until(lambda: not server.service._dispatcher.live_requests, "the end of the request")
        gate.open()
        # A client that stays gets its first answer whole, and is told that the connection ends with it.
        reader, writer = await asyncio.open_connection(*address_of(server))
        writer.write((head + body) * 2)
        answer = await asyncio.wait_for(reader.read(), allowed(20.0))
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer.lower()
        assert len(json.loads(answer.split(b"\r\n\r\n", 1)[1])["choices"]) == 1
        writer.close()
    finally:
        await server.stop()
        await prefill.stop()
        await decode.stop()
