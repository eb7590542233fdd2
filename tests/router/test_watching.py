"""``/cluster/events``: who watches, what they are sent, and what it costs while nobody does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from front_stage import PATIENCE, ScriptedService, hanging, serving
from test_top import routing

from protocol.errors import ConfigError
from router.front.app import Front
from router.front.config import FrontConfig
from router.front.keys import Gatekeeper, Key, hash_of, new_key
from router.front.watching import SharedSnapshot
from router.tokenizer import Tokenizer

OFTEN = 0.01
EVENTS = "/cluster/events"


class Counting(ScriptedService):
    """Tells how often it was looked at; each look is ``size`` bytes."""

    def __init__(self, size: int = 0) -> None:
        super().__init__(hanging())
        self.looks = 0
        self._ballast = "x" * size

    def cluster(self) -> dict[str, Any]:
        self.looks += 1
        return {"look": self.looks, "ballast": self._ballast}


def front_before(service: ScriptedService, tokenizer: Tokenizer, **config: float) -> Front:
    return Front(service, tokenizer, FrontConfig(**config))  # type: ignore[arg-type]


async def until(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < limit
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def watching(http: httpx.AsyncClient, key: str = "") -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """What a watcher is sent."""
    async with http.stream("GET", EVENTS, headers=shown(key)) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")

        async def events() -> AsyncIterator[dict[str, Any]]:
            async for line in answer.aiter_lines():
                if line:
                    yield json.loads(line.removeprefix("data: "))

        yield events()


def shown(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def client_of(url: str, address: str = "127.0.0.1") -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(local_address=address)
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE, transport=transport)


def test_a_snapshot_serves_for_its_time() -> None:
    taken = iter((b"one", b"two", b"three"))
    shared = SharedSnapshot(lambda: next(taken), 1.0)
    assert [shared.at(now) for now in (5.0, 5.5, 5.99, 6.0, 6.9, 100.0)] == [
        *(b"one", b"one", b"one", b"two", b"two", b"three")
    ]


async def test_watchers_share_their_snapshots_and_without_them_there_are_none(bpe_tokenizer: Tokenizer) -> None:
    service = Counting()
    front = front_before(service, bpe_tokenizer, watch_interval=OFTEN)
    with serving(front) as url:
        async with client_of(url) as http:
            async with watching(http) as one, watching(http) as other:
                seen = [[(await anext(events))["look"] for _ in range(5)] for events in (one, other)]
            assert seen[0] == sorted({*seen[0]}), "each is a new one"
            await until(lambda: front._watching.watchers == 0)
            looks = service.looks
            for _ in range(20):
                await http.get("/health")
            assert service.looks == looks
            async with watching(http) as again:
                assert (await anext(again))["look"] == looks + 1, "the first look is a fresh one"
        many = Counting()
        with serving(front_before(many, bpe_tokenizer, watch_interval=60.0)) as slow:
            async with client_of(slow) as http, contextlib.AsyncExitStack() as stack:
                watchers = [await stack.enter_async_context(watching(http)) for _ in range(8)]
                assert [(await anext(events))["look"] for events in watchers] == [1] * 8


async def test_no_more_watch_than_may(bpe_tokenizer: Tokenizer) -> None:
    front = front_before(Counting(), bpe_tokenizer, max_watchers=1)
    with serving(front) as url:
        async with client_of(url) as http:
            async with watching(http) as events:
                await anext(events)
                refused = await http.get(EVENTS)
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
                assert int(refused.headers["retry-after"]) >= 1
                assert (await http.get("/cluster")).status_code == 200
            await until(lambda: front._watching.watchers == 0)
            async with watching(http) as events:
                await anext(events)


async def test_one_key_does_not_take_the_places_of_all(bpe_tokenizer: Tokenizer) -> None:
    ann, bob = new_key(), new_key()
    gatekeeper = Gatekeeper(Key(name=name, sha256=hash_of(key)) for name, key in (("ann", ann), ("bob", bob)))
    front = Front(Counting(), bpe_tokenizer, FrontConfig(max_watchers=3, max_watchers_each=2), gatekeeper)
    with serving(front) as url:
        async with client_of(url) as http, contextlib.AsyncExitStack() as stack:
            watchers = [await stack.enter_async_context(watching(http, key)) for key in (ann, ann)]
            for events in watchers:
                await anext(events)
            refused = await http.get(EVENTS, headers=shown(ann))
            assert refused.status_code == 429
            assert "2 watch the cluster with this key" in refused.json()["error"]["message"]
            another = await stack.enter_async_context(watching(http, bob))
            await anext(another)
            refused = await http.get(EVENTS, headers=shown(bob))
            assert "3 watch the cluster, and no more" in refused.json()["error"]["message"]
        await until(lambda: front._watching.watchers == 0)


async def test_where_no_key_is_needed_one_address_does_not_either(bpe_tokenizer: Tokenizer) -> None:
    front = front_before(Counting(), bpe_tokenizer, max_watchers_each=1)
    with serving(front) as url:
        async with client_of(url) as http, client_of(url, "127.0.0.2") as other, watching(http) as events:
            await anext(events)
            refused = await http.get(EVENTS)
            assert refused.status_code == 429
            assert "1 watch the cluster from this address" in refused.json()["error"]["message"]
            async with watching(other) as elsewhere:
                await anext(elsewhere)


async def test_who_reads_nothing_is_dropped_and_others_watch_on(bpe_tokenizer: Tokenizer) -> None:
    front = front_before(Counting(1 << 20), bpe_tokenizer, watch_interval=OFTEN, watch_patience=0.2)
    with serving(front) as url:
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1)
        writer.write(f"GET {EVENTS} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
        await until(lambda: front._watching.watchers == 1)
        async with client_of(url) as http, watching(http) as events:
            await anext(events)
            await until(lambda: front._watching.watchers == 1)
            await anext(events)
        writer.transport.abort()
        await writer.wait_closed()


async def test_a_head_has_no_events(bpe_tokenizer: Tokenizer) -> None:
    service = Counting()
    with serving(front_before(service, bpe_tokenizer)) as url:
        async with client_of(url) as http:
            answer = await http.head(EVENTS)
            assert (answer.status_code, answer.content) == (200, b"")
            assert answer.headers["content-type"].startswith("text/event-stream")
    assert service.looks == 0


async def test_the_events_are_what_the_cluster_page_says_and_end_with_the_router(tmp_path: Path) -> None:
    async with (
        routing(tmp_path, stop_grace=60.0) as (server, fleet),
        client_of(server.url) as http,
        watching(http) as events,
    ):
        told = await anext(events)
        assert [alert["kind"] for alert in told["alerts"]] == ["unready"]
        fleet.add("prefill", "prefill-0")
        fleet.add("decode", "decode-0")
        while len(told["workers"]) < 2:
            told = await anext(events)
        asked = (await http.get("/cluster")).json()
        assert (told.keys(), told["alerts"]) == (asked.keys(), [])
        for worker, same in zip(told["workers"], asked["workers"], strict=True):
            assert {**worker, "last_seen_s": 0} == {**same, "last_seen_s": 0}
        # An answer that would go on for ever does not hold the router up.
        async with asyncio.timeout(60.0):
            await server.stop()
            assert [event async for event in events][1:] == []


@pytest.mark.parametrize("field", ["max_watchers", "max_watchers_each", "watch_interval", "watch_patience"])
def test_a_bound_that_will_not_do_is_named(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be .*, got 0") as caught:
        FrontConfig(**{field: 0})  # type: ignore[arg-type]
    assert caught.value.field == field
