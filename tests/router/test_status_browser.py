"""The status page in a real browser, before a whole router: what stands there is what ``/cluster`` says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import PHONE, Look, looking
from scripted_workers import Fleet, ScriptedWorker, until
from test_top import routing
from worker_facts import MODEL

from protocol.errors import EngineFailure
from protocol.histogram import BYTES, Observations
from protocol.messages import PoolCounts
from protocol.transfer_counts import PathCounts, TransferCounts
from router.client import AsyncClient, ClusterOverview
from router.front.keys import hash_of, new_key
from router.overview import WorkerOverview
from router.slo.classes import SLOClass, SLOConfig

PATIENCE = 10.0
BLOCKS = ("active", "exported", "importing", "draining", "cached", "free")
PROMPT = {"model": MODEL, "prompt": "the ferry", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def screenshots(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("screenshots"))


def busy_fleet(fleet: Fleet) -> tuple[ScriptedWorker, ScriptedWorker]:
    """A pair with something in every place."""
    ships = Observations(BYTES)
    for _ in range(1204):
        ships.add(350_000.0)
    leases = TransferCounts(
        opened=1240,
        ended={"settled": 1201, "cancelled": 31, "expired": 2},
        open=5,
        draining=1,
        paths={"shm": PathCounts(ship_bytes=ships.histogram())},
    )
    imports = TransferCounts(opened=1236, ended={"settled": 1201, "cancelled": 31}, open=4)
    prefill = PoolCounts(free=60, active=40, cached=90, exported=60, importing=0, draining=5, reserved=1, total=256)
    decode = PoolCounts(free=34, active=150, cached=40, exported=0, importing=29, draining=2, reserved=1, total=256)
    return (
        fleet.add("prefill", "prefill-0", pool=prefill, waiting=17, running=2, open_leases=5, transfer=leases),
        fleet.add("decode", "decode-0", pool=decode, running=23, open_imports=4, transfer=imports),
    )


def expected(told: ClusterOverview) -> dict[str, Any]:
    """What the page must say, by what the router does; without what differs from one moment to the next."""
    known = [each for each in told.workers if each.state != "lost"]
    workers = {role: [each for each in known if each.role == role] for role in ("prefill", "decode")}
    ended = {
        outcome if outcome == "cancelled" else f"{outcome}: {code}": {"requests": f"{count:,}"}
        for outcome, codes in told.totals.ended.items()
        for code, count in codes.items()
    }
    return {
        "alerts": [alert.text for alert in told.alerts],
        "fields": {
            name: f"{value:,}"
            for name, value in {
                "live_requests": told.live_requests,
                "queued": told.requests.queued,
                "prefilling": told.requests.prefilling,
                "handoff": told.requests.handoff,
                "decoding": told.requests.decoding,
                "leases": sum(worker.handoffs.open for worker in workers["prefill"]),
                "imports": sum(worker.handoffs.open for worker in workers["decode"]),
                "draining": sum(worker.handoffs.draining for worker in known),
                "handoffs": told.totals.handoffs,
            }.items()
        },
        "workers": {worker.name: expected_card(worker) for worker in told.workers},
        "latency": {
            name: {
                "count": counted(sum(told.latency[name].counts), "handoff" if name == "handoff" else "request"),
                "quantiles": {str(share): duration(told.latency[name].quantile(share / 100)) for share in (50, 90, 99)},
            }
            for name in ("ttft", "tpot", "handoff")
        },
        "handoffs": {
            worker.name: {
                name: f"{count:,}"
                for name, count in {
                    "open": worker.handoffs.open,
                    "draining": worker.handoffs.draining,
                    "opened": worker.handoffs.opened,
                    "settled": worker.handoffs.ended.get("settled", 0),
                    "lost": worker.handoffs.ended.get("lost", 0),
                }.items()
            }
            for worker in told.workers
        },
        "ended": ended or {"none yet": {"requests": "0"}},
    }


def expected_card(worker: WorkerOverview) -> dict[str, Any]:
    pool = worker.load.pool
    blocks = {name: getattr(pool, name) for name in BLOCKS if getattr(pool, name) or name == "free"}
    if worker.leaked_blocks:
        blocks["leaked"] = worker.leaked_blocks
    return {
        "role": worker.role,
        "state": worker.state,
        "blocks": blocks,
        "running": str(worker.load.running),
        "waiting": str(worker.load.waiting),
    }


def shown(read: dict[str, Any]) -> dict[str, Any]:
    """What the page says, in the form of :func:`expected`."""
    kept = ("open", "draining", "opened", "settled", "lost")
    return {
        **{name: read[name] for name in ("alerts", "fields", "ended")},
        "workers": {
            name: {
                **{field: card[field] for field in ("role", "state", "blocks")},
                **{fact: card["facts"][fact] for fact in ("running", "waiting")},
            }
            for name, card in read["workers"].items()
        },
        "latency": {
            name: {field: chart[field] for field in ("count", "quantiles")} for name, chart in read["latency"].items()
        },
        "handoffs": {name: {column: row[column] for column in kept} for name, row in read["handoffs"].items()},
    }


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, name in ((1e6, "µs"), (1e3, "ms"), (1.0, "s")):
        if (seconds < 0.001) == (name == "µs") and (seconds < 1 or name == "s"):
            return f"{round(seconds * unit, 1):,.10g} {name}"
    raise AssertionError(seconds)


async def agrees(look: Look, client: AsyncClient, reached: Callable[[ClusterOverview], object]) -> dict[str, Any]:
    """Wait until the router is where it shall be, and the page says so too; gives what is on the page."""
    limit = time.monotonic() + PATIENCE
    while True:
        told, read = await client.cluster(), await look.read()
        if reached(told) and read["shows"] and shown(read) == expected(told):
            return read
        assert time.monotonic() < limit, (expected(told), read)
        await asyncio.sleep(0.05)


async def eventually(look: Look, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    limit = time.monotonic() + PATIENCE
    while not condition(read := await look.read()):
        assert time.monotonic() < limit, read
        await asyncio.sleep(0.05)
    return read


async def test_the_page_says_what_the_router_does_and_follows_it(tmp_path: Path, screenshots: str) -> None:
    async with (
        looking(screenshots) as look,
        routing(tmp_path) as (server, fleet),
        AsyncClient(server.url) as client,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as http,
    ):
        await look.page.goto(server.url)
        read = await agrees(look, client, lambda told: told.alerts)
        assert read["queue"] is None, "nothing waits for its turn here"
        assert read["title"].startswith("▲ 1 "), "nobody is there to serve"
        prefill, decode = busy_fleet(fleet)
        before = await agrees(look, client, lambda told: len(told.workers) == 2 and not told.alerts)
        assert before["link"] == "live"
        assert MODEL in before["about"]
        for name, worker in (("prefill-0", prefill), ("decode-0", decode)):
            bar = before["workers"][name]["bar"]
            pool = worker.load["pool"]
            assert isinstance(pool, PoolCounts)
            width = sum(bar.values())
            for block, pixels in bar.items():
                assert pixels / width == pytest.approx(getattr(pool, block) / 255, abs=0.02)
        # A request and then a stream that stands.
        assert (await http.post("/v1/completions", json=PROMPT)).status_code == 200
        decode.load["decode_tokens"], decode.load["running"] = 5000, 24
        decode.hold = 3
        async with http.stream("POST", "/v1/completions", json={**PROMPT, "stream": True}) as answer:
            body = answer.aiter_bytes()
            await anext(body)
            during = await agrees(
                look, client, lambda told: told.requests.decoding == 1 and told.workers[0].load.running == 24
            )
            assert during["ended"] == {"finished: length": {"requests": "1"}}
            assert during["latency"]["ttft"]["count"] == "2 requests"
            assert sum(height > 0 for height in during["latency"]["ttft"]["bars"]) in (1, 2)
            rates = await eventually(look, lambda read: read["rates"]["output"] not in ("-", "0"))
            assert float(rates["workers"]["decode-0"]["facts"]["tokens/s"].replace(",", "")) > 0
            await look.keep("light")
            decode.hold = None
            async for _ in body:
                pass
        # One that cannot be reached is named, in whatever words.
        decode.load["pool"] = PoolCounts(
            free=34, active=150, cached=40, exported=0, importing=25, draining=2, reserved=1, total=256
        )
        await agrees(look, client, lambda told: [alert.kind for alert in told.alerts] == ["leak"])
        await prefill.kill()
        gone = await agrees(look, client, lambda told: {alert.kind for alert in told.alerts} >= {"lost", "leak"})
        assert gone["workers"]["prefill-0"]["state"] == "lost"
        await look.page.emulate_media(color_scheme="dark")
        await look.keep("dark")
        await look.page.set_viewport_size(PHONE)
        assert (await look.read())["width"] <= PHONE["width"]
        await look.keep("phone")
        assert look.complaints == []
        assert {*look.asked} == {"data:,", f"{server.url}/", f"{server.url}/cluster/events"} & {*look.asked}
        assert f"{server.url}/cluster/events" in look.asked


async def test_what_waits_is_shown_by_class(tmp_path: Path, screenshots: str) -> None:
    slo = SLOConfig(classes=(SLOClass(name="fast", ttft=1.5), SLOClass(name="batch")), default="batch")
    async with (
        looking(screenshots) as look,
        routing(tmp_path, slo=slo) as (server, fleet),
        httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=PATIENCE) as http,
    ):
        fleet.add("decode", "decode-0", free=1000)
        prefill = fleet.add("prefill", "prefill-0", waiting_tokens=1000, steps=10_000, step_per_token=1e-3)
        await until(lambda: server.service.health().ready)
        waiting = [asyncio.create_task(http.post("/v1/completions", json=PROMPT)) for _ in range(2)]
        await look.page.goto(server.url)
        none = {"TTFT": "-", "TTFT kept": "-", "TPOT": "-", "TPOT kept": "-"}
        idle = {"waiting": "0", "admitted": "0", "refused": "0", **none, "TTFT": "1.5 s"}
        read = await eventually(look, lambda read: (read["queue"] or {}).get("batch", {}).get("waiting") == "2")
        assert read["queue"] == {"fast": idle, "batch": {**idle, **none, "waiting": "2"}}
        prefill.load["waiting_tokens"] = 0
        await asyncio.gather(*waiting)
        await eventually(look, lambda read: read["queue"]["batch"]["admitted"] == "2")
        assert (await http.post("/v1/completions", json={**PROMPT, "slo_class": "fast"})).status_code == 200
        await eventually(look, lambda read: read["queue"]["fast"]["TTFT kept"] == "100 %")
        await look.keep("classes")
        assert look.complaints == []


async def test_a_key_is_asked_for_and_kept_in_the_tab_alone(tmp_path: Path, screenshots: str) -> None:
    key = new_key()
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{name: ann, sha256: {hash_of(key)}}}]\n")
    async with looking(screenshots) as look, routing(tmp_path, api_keys=str(keys)) as (server, fleet):
        busy_fleet(fleet)
        await until(lambda: server.service.health().ready)
        await look.page.goto(server.url)
        read = await eventually(look, lambda read: read["asks"])
        assert not read["shows"]
        assert (read["about"], read["workers"], read["fields"]["live_requests"]) == ("", {}, "")
        await look.keep("key")
        await look.page.get_by_label("API key").fill(new_key())
        await look.page.get_by_role("button", name="Show").click()
        await look.page.get_by_text("does not know this key").wait_for()
        await look.page.get_by_label("API key").fill(key)
        await look.page.keyboard.press("Enter")
        await eventually(look, lambda read: read["shows"] and len(read["workers"]) == 2)
        await look.page.reload()
        await eventually(look, lambda read: read["shows"] and len(read["workers"]) == 2)
        other = Look(await look.page.context.new_page(), screenshots)
        await other.page.goto(server.url)
        await eventually(other, lambda read: read["asks"])
        assert not [url for url in look.asked + other.asked if key in url]
        assert {*look.complaints} == {
            "Failed to load resource: the server responded with a status of 401 (Unauthorized)"
        }, "the browser says so itself"


async def test_names_are_text_and_what_is_old_is_shown_as_old(tmp_path: Path, screenshots: str) -> None:
    async with looking(screenshots) as look:
        async with routing(tmp_path, breaker_failures=1, max_attempts=1) as (server, fleet):
            prefill, _ = busy_fleet(fleet)
            await until(lambda: server.service.health().ready)
            prefill.refuse = EngineFailure("<img src=x onerror=alert(1)><b>bold</b>")
            async with httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
                assert (await http.post("/v1/completions", json=PROMPT)).status_code >= 500
            await look.page.goto(server.url)
            read = await eventually(look, lambda read: read["alerts"])
            assert "<img src=x onerror=alert(1)><b>bold</b>" in read["alerts"][0]
            assert await look.page.locator("#alerts b, #alerts img").count() == 0
        await eventually(look, lambda read: read["link"] == "lost")
        assert await look.page.locator("main.stale").count() == 1
        assert not [text for text in look.complaints if "ERR_CONNECTION_REFUSED" not in text]
