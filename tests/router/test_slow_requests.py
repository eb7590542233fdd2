"""A client that takes for ever to send a request holds no connection for longer than that is allowed to take."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from scripted_workers import fleet_at, until
from test_server import routing, tokenizer_dir
from worker_facts import MODEL

from router import http_protocol
from router.server import RouterServer

__all__ = ["tokenizer_dir"]

SOON = 0.3
LATE = 30.0
BODY = json.dumps({"model": MODEL, "prompt": "the ferry", "max_tokens": 4, "ignore_eos": True, "stream": True}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % len(BODY)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", SOON)
    monkeypatch.setattr(http_protocol, "BODY_SECONDS", SOON)


async def dialled(server: RouterServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    return await asyncio.open_connection(host, int(port))


async def cut_off(server: RouterServer, said: bytes = b"") -> bytes:
    """What is heard by one who says so much and no more, until the router hangs up."""
    reader, writer = await dialled(server)
    writer.write(said)
    heard = await asyncio.wait_for(reader.read(), LATE)
    writer.close()
    return heard


async def test_what_does_not_come_is_not_waited_for(tokenizer_dir: Path) -> None:
    async with routing(tokenizer_dir) as server:
        said = [b"", b"P", HEAD, HEAD + b"\r\n", HEAD + b"\r\n" + BODY[:-1]]
        heard = await asyncio.gather(*(cut_off(server, each) for each in said))
        assert [each[:13] for each in heard] == [b"HTTP/1.1 408 "] * len(said)
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
            assert (await client.get("/metrics")).status_code == 200


@pytest.mark.parametrize(("begin", "drop"), [(HEAD, b"x: y\r\n"), (HEAD + b"\r\n", b" ")], ids=["head", "body"])
async def test_drop_by_drop_is_no_progress(tokenizer_dir: Path, begin: bytes, drop: bytes) -> None:
    async with routing(tokenizer_dir) as server:
        reader, writer = await dialled(server)
        writer.write(begin)
        heard = asyncio.create_task(reader.read())
        async with asyncio.timeout(LATE):
            while not heard.done():
                writer.write(drop)
                await asyncio.wait({heard}, timeout=SOON / 10)
        # Who goes on after that is not listened to, and may lose what was said to it.
        (end,) = await asyncio.gather(heard, return_exceptions=True)
        assert isinstance(end, ConnectionError) or end.startswith(b"HTTP/1.1 408 ")
        writer.transport.abort()


async def test_who_is_idle_between_two_requests_or_waits_for_an_answer_is_not_cut_off(tokenizer_dir: Path) -> None:
    async with routing(tokenizer_dir) as server, fleet_at(server.hub_endpoint) as fleet:
        fleet.add("prefill", "p0")
        decode = fleet.add("decode", "d0")
        await until(lambda: server.service.health().ready)
        decode.hold = 2
        reader, writer = await dialled(server)
        writer.write(HEAD + b"\r\n" + BODY)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LATE)
        # As long as this takes, the answer goes on.
        assert (await cut_off(server)).startswith(b"HTTP/1.1 408 ")
        decode.hold = None
        answer = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), LATE)
        assert (head[:15], answer.count(b"[DONE]")) == (b"HTTP/1.1 200 OK", 1)
        assert (await cut_off(server)).startswith(b"HTTP/1.1 408 ")
        writer.write(HEAD + b"\r\n" + BODY)
        assert (await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), LATE)).count(b"[DONE]") == 1
        writer.close()
