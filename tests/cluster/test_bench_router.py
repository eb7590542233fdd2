"""``kvferry bench router``: a real router, and workers that speak the wire, each a process of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from cluster.bench.router.figures import RouterReport
from cluster.bench.router.measure import RouterOptions
from cluster.bench.router.streams import Connection
from protocol.errors import ConfigError, ConnectionFailed

PATIENCE = 120.0
CHUNKS = [
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
    b'2e\r\ndata: {"id":"a","choices":[{"text":"the"}]}\n\n\r\n',
    b'30\r\ndata: {"id":"a","choices":[{"text":" ferry"}]}\n\n\r\n',
    b'28\r\ndata: {"id":"a","choices":[]}\n\ndata: [DONE]\n\n\r\n',
    b"0\r\n\r\n",
]


def test_a_short_run_gives_figures_and_leaves_no_process(tiny_llama_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    command = (sys.executable, "-m", "cluster", "bench", "router", "--model", str(tiny_llama_dir), "--json", str(file))
    sizes = ("--runs", "10", "--streams", "1,4", "--rate", "400", "--seconds", "0.1", "--requests", "40")
    done = subprocess.run([*command, *sizes], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(file.read_bytes(), type=RouterReport)
    assert (report.first_token.samples, report.cancelled.samples) == (10, 1)
    assert 0 < report.first_token.p50 <= report.first_token.p99
    assert [(row.streams, row.wanted) for row in report.streams] == [(1, 400), (1, None), (4, 400), (4, None)]
    for row in report.streams:
        assert row.tokens == 40
        assert 0 < row.events <= row.tokens
        assert row.cpu_per_token > 0
        assert row.first.samples == row.streams
    assert report.memory is not None
    assert report.memory.requests == 40
    assert "added to the time to the first token" in done.stdout
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


@asynccontextmanager
async def answering(pieces: Sequence[bytes]) -> AsyncIterator[str]:
    """A server that answers every request with these bytes, each in a packet of its own."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield "http://{}:{}".format(*server.sockets[0].getsockname()[:2])
    finally:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
async def test_events_are_counted_however_the_bytes_come(size: int) -> None:
    whole = b"".join(CHUNKS)
    async with answering([whole[at : at + size] for at in range(0, len(whole), size)]) as url:
        connection = await Connection(url).open()
        connection.ask(b"{}")
        seen = await connection.answered()
        assert seen.events == 3
        assert 0 < seen.first <= seen.last


@pytest.mark.parametrize("pieces", [CHUNKS[:3], [b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\n{}"]])
async def test_an_answer_that_is_not_whole_is_an_error(pieces: list[bytes]) -> None:
    async with answering(pieces) as url:
        connection = await Connection(url).open()
        connection.ask(b"{}")
        with pytest.raises(ConnectionFailed):
            await connection.answered()


def test_a_wrong_number_of_streams_is_named() -> None:
    with pytest.raises(ConfigError, match="streams") as caught:
        RouterOptions(tokenizer=Path(), runs=1, streams=(0,), tokens_per_second=1.0, seconds=1.0, requests=0)
    assert caught.value.field == "streams"
