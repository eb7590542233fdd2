"""The whole router: uvicorn, front and service, asked by HTTP; workers follow a script."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import tokenizers
from scripted_workers import fleet_at, until
from worker_facts import MODEL

from protocol.errors import CheckpointUnavailable, StartFailed
from router.config import RouterConfig
from router.server import RouterServer


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizer")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<end>"],
        show_progress=False,
    )
    made.train_from_iterator(["the ferry crosses the river", "the river is wide"], trainer)
    made.save(str(root / "tokenizer.json"))
    (root / "config.json").write_text(json.dumps({"vocab_size": 1000, "max_position_embeddings": 4096}))
    (root / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return root


@contextlib.asynccontextmanager
async def routing(tokenizer: Path, **settings: object) -> AsyncIterator[RouterServer]:
    before = asyncio.all_tasks()
    config = RouterConfig(model=MODEL, tokenizer=str(tokenizer), **{"port": 0, **settings})  # type: ignore[arg-type]
    server = RouterServer(config)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
        await server.stop()
    assert asyncio.all_tasks() <= before, "no task is left"


async def test_a_completion_goes_through_the_whole_router(tokenizer_dir: Path) -> None:
    async with (
        routing(tokenizer_dir) as server,
        fleet_at(server.hub_endpoint) as fleet,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as client,
    ):
        assert (await client.get("/health")).status_code == 503
        fleet.add("prefill", "p0")
        fleet.add("decode", "d0")
        await until(lambda: server.service.health().ready)
        assert (await client.get("/health")).status_code == 200
        body = {"model": MODEL, "prompt": "the ferry", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 5
        metrics = await client.get("/metrics")
        assert 'kvferry_requests_total{code="length",outcome="finished"} 1.0' in metrics.text
        workers = (await client.get("/cluster")).json()["workers"]
        assert {each["name"] for each in workers} == {"p0", "d0"}


async def test_stopping_ends_an_open_stream_within_the_grace(tokenizer_dir: Path) -> None:
    async with (
        routing(tokenizer_dir, stop_grace=0.5) as server,
        fleet_at(server.hub_endpoint) as fleet,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as client,
    ):
        prefill, decode = fleet.add("prefill", "p0"), fleet.add("decode", "d0")
        await until(lambda: server.service.health().ready)
        decode.hold = 2
        body = {"model": MODEL, "prompt": "the ferry", "max_tokens": 50, "stream": True, "ignore_eos": True}

        async def read() -> None:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_bytes():
                    pass

        reading = asyncio.create_task(read())
        await until(lambda: bool(decode.opened))
        async with asyncio.timeout(8):
            await server.stop()
        await asyncio.gather(reading, return_exceptions=True)
        assert server.service.cluster()["live_requests"] == 0
        # A token that was on its way to nobody is answered with a further cancel.
        await until(lambda: {*prefill.cancels} == {*decode.cancels} == {prefill.opened[0].key})


async def test_a_taken_port_is_named_and_nothing_is_left(tokenizer_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        before = asyncio.all_tasks()
        server = RouterServer(RouterConfig(model=MODEL, tokenizer=str(tokenizer_dir), port=port))
        with pytest.raises(StartFailed, match=f"127.0.0.1:{port}"):
            await server.start()
        assert asyncio.all_tasks() == before


async def test_a_taken_hub_gives_the_port_back(tokenizer_dir: Path) -> None:
    async with routing(tokenizer_dir) as first:
        second = RouterServer(RouterConfig(model=MODEL, tokenizer=str(tokenizer_dir), port=0, hub=first.hub_endpoint))
        with pytest.raises(StartFailed, match="cannot bind"):
            await second.start()
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(second.url.rsplit(":", 1)[1]))) != 0


async def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    server = RouterServer(RouterConfig(model=MODEL, tokenizer=str(tmp_path), port=0))
    with pytest.raises(CheckpointUnavailable, match=r"tokenizer\.json"):
        await server.start()


async def test_wait_returns_when_stopped_and_tells_of_a_loop_that_ended_by_itself(tokenizer_dir: Path) -> None:
    async with routing(tokenizer_dir) as server:
        waiting = asyncio.create_task(server.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        await server.stop()
        await waiting
    async with routing(tokenizer_dir) as server:
        waiting = asyncio.create_task(server.wait())
        await asyncio.sleep(0)
        server.service.tasks[0].cancel()
        with pytest.raises(StartFailed, match="router-receive ended by itself"):
            await waiting


async def test_a_router_takes_the_port_of_another_and_no_client_loses_anything(tokenizer_dir: Path) -> None:
    body = {"model": MODEL, "prompt": "the ferry", "max_tokens": 4, "temperature": 0, "ignore_eos": True}

    async def inherit(_: object) -> socket.socket:
        shared = former.share()
        assert shared is not None
        return shared.dup()

    async with contextlib.AsyncExitStack() as stack:
        former = await stack.enter_async_context(routing(tokenizer_dir))
        fleet = await stack.enter_async_context(fleet_at(former.hub_endpoint))
        fleet.add("prefill", "p0")
        decode = fleet.add("decode", "d0")
        await until(lambda: former.service.health().ready)
        kept = await stack.enter_async_context(httpx.AsyncClient(base_url=former.url, trust_env=False, timeout=60))
        assert "connection" not in (await kept.post("/v1/completions", json=body)).headers
        decode.hold = 2
        begun = asyncio.create_task(kept.post("/v1/completions", json=body))
        await until(lambda: len(decode.opened) == 2)
        assert (await kept.get("/cluster")).json()["router"] == "router-0", "a second connection, which idles"

        successor = RouterServer(RouterConfig(model=MODEL, tokenizer=str(tokenizer_dir), name="router-1"), inherit)
        await successor.start()
        stack.push_async_callback(successor.stop)
        assert successor.url == former.url
        others = await stack.enter_async_context(fleet_at(successor.hub_endpoint))
        others.add("prefill", "p0")
        others.add("decode", "d0")
        await until(lambda: successor.service.health().ready)

        leaving = asyncio.create_task(former.leave(60.0))
        await until(lambda: former.share() is None)
        for _ in range(4):
            async with httpx.AsyncClient(base_url=former.url, trust_env=False) as fresh:
                assert (await fresh.get("/cluster")).json()["router"] == "router-1"
                assert (await fresh.post("/v1/completions", json=body)).status_code == 200
        last = await kept.get("/cluster")
        assert (last.json()["router"], last.headers["connection"]) == ("router-0", "close"), (
            "it is served and told to go"
        )
        assert (await kept.get("/cluster")).json()["router"] == "router-1"
        assert not leaving.done(), "an answer is open"
        decode.hold = None
        assert (await begun).json()["usage"]["completion_tokens"] == 4
        assert (await kept.get("/cluster")).json()["router"] in ("router-0", "router-1")
        await kept.aclose()
        await asyncio.wait_for(leaving, 60)


async def test_a_router_leaves_whoever_does_not_hang_up_at_its_limit(tokenizer_dir: Path) -> None:
    async with (
        routing(tokenizer_dir) as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as client,
    ):
        assert (await client.get("/cluster")).status_code == 200
        await asyncio.wait_for(server.leave(0.05), 20)
        assert (await client.get("/cluster")).status_code == 200, "the connection is there until it stops"
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(server.url.rpartition(":")[2]))) != 0
