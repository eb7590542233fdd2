"""``kvferry top`` before a whole router: what is shown is what the workers say."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import Result
from front_stage import write_checkpoint
from msgspec.structs import replace
from rich.console import Console
from scripted_workers import Fleet, fleet_at, until
from typer.testing import CliRunner
from worker_facts import MODEL

from cluster.cli import app
from cluster.frame import BAR, frame
from protocol.errors import MalformedFrame, Unauthorized
from router.client import AsyncClient, Client, ClusterOverview
from router.client.overview import overview_of
from router.config import RouterConfig
from router.front.keys import hash_of, new_key
from router.overview import Alert, ClassOverview, Latency, LiveStates
from router.server import RouterServer


@contextlib.asynccontextmanager
async def routing(folder: Path, **settings: object) -> AsyncIterator[tuple[RouterServer, Fleet]]:
    checkpoint = write_checkpoint(folder / "checkpoint")
    server = RouterServer(RouterConfig(model=MODEL, tokenizer=str(checkpoint), port=0, **settings))  # type: ignore[arg-type]
    await server.start()
    try:
        async with fleet_at(server.hub_endpoint) as fleet:
            yield server, fleet
    finally:
        await server.stop()


async def top(*args: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ["top", *args])


def drawn(*args: ClusterOverview | float) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(frame(*args))  # type: ignore[arg-type]
    return console.export_text()


async def seen(client: AsyncClient, count: int) -> ClusterOverview:
    for _ in range(1000):
        told = await client.cluster()
        if len(told.workers) == count:
            return told
        await asyncio.sleep(0.01)
    raise AssertionError(told)


def watched(url: str) -> int:
    """Exit status of a ``kvferry top`` on a terminal that got Ctrl-C after its second frame."""
    ours, its = os.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster", "top", url, "--interval", "0.1"],
            stdin=its,
            stdout=its,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "200", "LINES": "40"},
        )
        try:
            shown = b""
            while shown.count(b"policy") < 2:
                assert select.select([ours], [], [], 20.0)[0], shown
                shown += os.read(ours, 1 << 16)
            process.send_signal(signal.SIGINT)
            # What it still says must be read, or it waits for that.
            while process.poll() is None:
                if select.select([ours], [], [], 0.05)[0]:
                    os.read(ours, 1 << 16)
            return process.returncode
        finally:
            process.kill()
            process.wait()
    finally:
        os.close(ours)
        os.close(its)


async def test_it_goes_on_until_it_is_interrupted(tmp_path: Path) -> None:
    async with routing(tmp_path) as (server, _):
        assert await asyncio.to_thread(watched, server.url) == 0


async def test_a_frame_shows_the_workers_and_who_is_gone(tmp_path: Path) -> None:
    async with routing(tmp_path) as (server, fleet), AsyncClient(server.url) as client:
        assert "policy" in (await top(server.url, "--once")).stdout, "without a worker, too"
        fleet.add("decode", "decode-0", decode_tokens=1000, kv_bytes=5_000_000, running=3)
        prefill = fleet.add("prefill", "prefill-0", waiting=17, open_leases=2)
        told = await seen(client, 2)

        shown = await top(server.url, "--once")
        assert (shown.exit_code, shown.exception) == (0, None)
        lines = {line.split()[1]: line.split() for line in shown.stdout.splitlines() if "-0 " in line}
        assert {"prefill-0", "live", "0/63", "17", "2"} <= {*lines["prefill-0"]}
        assert {"decode-0", "live", "3"} <= {*lines["decode-0"]}
        assert "lost" not in shown.stdout

        as_json = json.loads((await top(server.url, "--json")).stdout)
        assert [each["load"]["waiting"] for each in as_json["workers"] if each["name"] == "prefill-0"] == [17]
        with Client(server.url) as synchronous:
            again = await asyncio.to_thread(synchronous.cluster)
        assert [each.name for each in again.workers] == [each.name for each in told.workers]

        await prefill.kill()
        await until(lambda: server.service.health().prefill_workers == 0)
        assert "prefill-0 is lost: " in (await top(server.url, "--once")).stdout


async def test_the_pool_the_rates_and_what_is_wrong(tmp_path: Path) -> None:
    async with routing(tmp_path) as (server, fleet), AsyncClient(server.url) as client:
        fleet.add("decode", "decode-0", decode_tokens=1000, kv_bytes=5_000_000)
        before = await seen(client, 1)
    (worker,) = before.workers
    assert "░" * BAR in drawn(before)
    pool = replace(worker.load.pool, free=0, active=21, exported=21, cached=21)
    load = replace(worker.load, pool=pool, decode_tokens=1300, kv_bytes=11_000_000)
    busy = replace(before, workers=(replace(worker, load=load),))
    assert "█" * BAR in drawn(busy)
    cells = drawn(busy, before, 2.0).split()
    assert {"42/63", "150", "3.0"} <= {*cells}
    fresh = replace(before, workers=(replace(worker, load=load, incarnation=worker.incarnation + 1),))
    assert "150" not in drawn(fresh, before, 2.0).split(), "another incarnation counts from 0"
    leaky = replace(before, alerts=(Alert(kind="leak", worker="decode-0", text="decode-0 has 4 leaked blocks"),))
    assert "decode-0 has 4 leaked blocks" in drawn(leaky)
    assert "TTFT -" in drawn(before)
    queue = ClassOverview(name="fast", ttft_s=1.0, tpot_s=0.0, waiting=3, admitted=9, refused={"target": 2})
    classes = (queue, replace(queue, name="slow", refused={}, kept={"ttft": 7}, missed={"ttft": 1}))
    told = drawn(replace(before, classes=classes))
    assert "class fast: 3 waiting, 9 admitted, refused: 2 target" in told
    assert "class slow: 3 waiting, 9 admitted, refused: 0; TTFT kept by 7 of 8" in told
    timed = Latency(bounds=(0.1, 0.2), counts=(50, 50, 0), total_s=12.0)
    told = drawn(replace(before, requests=LiveStates(queued=1, decoding=7), latency={"ttft": timed}))
    assert "1 queued, 0 prefilling, 0 in handoff, 7 decoding; TTFT p50 100 ms, p99 198 ms" in told


async def test_a_key_in_a_file_lets_it_in(tmp_path: Path) -> None:
    key = new_key()
    keys, own = tmp_path / "keys.yaml", tmp_path / "own"
    keys.write_text(f"keys: [{{name: ann, sha256: {hash_of(key)}}}]\n")
    own.write_text(f"{key}\n")
    async with routing(tmp_path, api_keys=str(keys)) as (server, _):
        assert isinstance((await top(server.url, "--once")).exception, Unauthorized)
        assert (await top(server.url, "--once", "--api-key-file", str(own))).exit_code == 0


@pytest.mark.parametrize("body", [b"", b"[]", b'{"workers": []}', b'{"model": 1}'])
def test_what_is_no_overview_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedFrame, match="cannot be read"):
        overview_of(body)
