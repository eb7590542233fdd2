"""The router's queue before real sockets and scripted workers: who waits, whose turn it is, what clients are told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted_workers import Fleet, ScriptedWorker, fleet_at, greedy, until, whole_text
from worker_facts import MODEL

from protocol.errors import DeadlineExceeded, Overloaded, TargetOutOfReach
from router.config import RouterConfig
from router.front.generation import Generation
from router.overview import ClusterOverview, Unserved
from router.service import Service
from router.slo.classes import SLOClass, SLOConfig

PROMPT = (3, 4, 5, 6)
BUSY, IDLE = 1000, 0
CLASSES = SLOConfig(
    classes=(SLOClass(name="fast", ttft=2.0, tpot=5.0), SLOClass(name="slow", max_queue=4), SLOClass(name="brief"))
)


@contextlib.asynccontextmanager
async def serving(slo: SLOConfig = CLASSES) -> AsyncIterator[tuple[Service, Fleet, ScriptedWorker]]:
    """A router with a decode worker, and a prefill worker that is a second behind."""
    before = asyncio.all_tasks()
    service = Service(RouterConfig(model=MODEL, tokenizer="unused", slo=slo))
    await service.start()
    try:
        async with fleet_at(service.hub_endpoint) as fleet:
            fleet.add("decode", "d0", free=1000)
            prefill = fleet.add("prefill", "p0", waiting_tokens=BUSY, steps=10_000, step_per_token=1e-3)
            await until(lambda: service.health().ready)
            yield service, fleet, prefill
    finally:
        await service.close()
    assert asyncio.all_tasks() <= before, "no task is left"


def asked(slo: str = "slow", tenant: str = "", **more: object) -> Generation:
    return Generation(PROMPT, greedy(4), slo_class=slo, tenant=tenant, **more)  # type: ignore[arg-type]


async def read(service: Service, generation: Generation) -> tuple[int, ...]:
    return tuple([token async for output in service.generate(generation) for token in output.token_ids])


def counted(service: Service, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(service.metrics().decode())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def unserved(service: Service) -> Unserved:
    return msgspec.convert(service.cluster(), ClusterOverview).unserved


async def test_requests_wait_in_the_router_and_go_on_when_there_is_room() -> None:
    async with serving() as (service, _, prefill):
        reading = [asyncio.create_task(read(service, asked())) for _ in range(3)]
        await until(lambda: counted(service, "kvferry_admission_waiting", **{"class": "slow"}) == 3)
        assert prefill.opened == []
        assert service.cluster()["live_requests"] == 3
        assert unserved(service) == Unserved(waiting=3, waiting_tokens=3 * len(PROMPT))
        prefill.load["waiting_tokens"] = IDLE
        assert await asyncio.gather(*reading) == [whole_text(PROMPT, 4)] * 3
        assert counted(service, "kvferry_admitted_total", **{"class": "slow"}) == 3
        assert counted(service, "kvferry_admission_wait_seconds_count", **{"class": "slow"}) == 3
        assert counted(service, "kvferry_admission_waiting") == 0


async def test_the_overview_tells_what_waits_of_each_class_and_what_became_of_it() -> None:
    async with serving() as (service, _, prefill):
        reading = [asyncio.create_task(read(service, asked(slo))) for slo in ("slow", "slow", "fast")]
        await until(lambda: counted(service, "kvferry_admission_waiting") == 3)
        prefill.load["waiting_tokens"] = 3 * BUSY
        await until(lambda: service.cluster()["workers"][1]["load"]["waiting_tokens"] == 3 * BUSY)
        with pytest.raises(TargetOutOfReach):
            await read(service, asked("fast"))
        told = {each.name: each for each in msgspec.convert(service.cluster(), ClusterOverview).classes}
        assert [*told] == ["default", "fast", "slow", "brief"]
        assert {name: (each.waiting, each.admitted) for name, each in told.items()} == {
            **dict.fromkeys(("default", "brief"), (0, 0)),
            "fast": (1, 0),
            "slow": (2, 0),
        }
        assert (told["fast"].refused, told["slow"].refused) == ({"target": 1}, {})
        assert (told["fast"].ttft_s, told["fast"].tpot_s, told["slow"].ttft_s) == (2.0, 5.0, 0.0)
        prefill.load["waiting_tokens"] = IDLE
        await asyncio.gather(*reading, return_exceptions=True)
        told = {each.name: each for each in msgspec.convert(service.cluster(), ClusterOverview).classes}
        assert (told["slow"].waiting, told["slow"].admitted) == (0, 2)
    async with serving(SLOConfig()) as (service, _, _):
        assert service.cluster()["classes"] == ()


async def test_choices_of_one_prompt_wait_and_start_as_one() -> None:
    async with serving() as (service, _, prefill):
        with service.together([asked(), asked(), asked()]) as sources:
            first = [asyncio.ensure_future(anext(source)) for source in sources]
            await asyncio.sleep(0)  # each is read from now on
            assert counted(service, "kvferry_admission_waiting") == 1
            assert unserved(service) == Unserved(waiting=1, waiting_tokens=len(PROMPT))
            first[0].cancel()
            await asyncio.gather(first[0], return_exceptions=True)
            prefill.load["waiting_tokens"] = IDLE
            outputs = await asyncio.gather(*first[1:])
            assert all(output.token_ids[0] == whole_text(PROMPT, 1)[0] for output in outputs)
        (opened,) = prefill.opened
        assert len(opened.forks) == 1


async def test_who_leaves_the_queue_or_runs_out_of_time_holds_nobody_up() -> None:
    async with serving() as (service, _, prefill):
        gone = asyncio.create_task(read(service, asked()))
        late = asyncio.create_task(read(service, asked(timeout=1.5)))
        stays = asyncio.create_task(read(service, asked()))
        await until(lambda: counted(service, "kvferry_admission_waiting") == 3)
        gone.cancel()
        with pytest.raises((DeadlineExceeded, TargetOutOfReach)):
            await late
        assert counted(service, "kvferry_admission_waiting") == 1
        prefill.load["waiting_tokens"] = IDLE
        assert await stays == whole_text(PROMPT, 4)
        assert service.cluster()["live_requests"] == 0


async def test_who_would_be_too_late_is_refused_at_once_and_may_ask_why() -> None:
    async with serving() as (service, _, prefill):
        prefill.load["waiting_tokens"] = 3 * BUSY
        await until(lambda: service.cluster()["workers"][1]["load"]["waiting_tokens"] == 3 * BUSY)
        with pytest.raises(
            TargetOutOfReach, match=r"predicted in (2\.9|3).* wanted within 2 s \(class 'fast'\)"
        ) as refused:
            await read(service, asked("fast", name="mine"))
        assert 1.0 < refused.value.retry_after < 2.0
        assert unserved(service) == Unserved(refused=1, refused_tokens=len(PROMPT))
        (told,) = service.explain("mine")
        assert told["admission"]["outcome"] == "target"
        assert told["admission"]["class"] == "fast"
        assert told["admission"]["predicted_ttft_s"] == pytest.approx(3.0, rel=0.1)
        assert counted(service, "kvferry_refused_total", **{"class": "fast", "reason": "target"}) == 1
        prefill.load["waiting_tokens"] = IDLE
        await until(lambda: service.cluster()["workers"][1]["load"]["waiting_tokens"] == IDLE)
        assert await read(service, asked("fast", name="again")) == whole_text(PROMPT, 4)
        (told,) = service.explain("again")
        assert told["admission"] == {
            "class": "fast",
            "outcome": "admitted",
            "waited_s": 0.0,
            "wanted_s": 2.0,
            "predicted_ttft_s": None,
        }
        assert counted(service, "kvferry_slo_targets_total", **{"class": "fast", "outcome": "kept"}) == 2


async def test_who_has_until_a_deadline_asks_for_no_worker() -> None:
    async with serving(SLOConfig(classes=(SLOClass(deadline=60.0),), backlog=1e-3)) as (service, _, prefill):
        reading = asyncio.create_task(read(service, asked("")))
        await until(lambda: counted(service, "kvferry_admission_waiting") == 1)
        assert unserved(service) == Unserved()
        prefill.load["waiting_tokens"] = IDLE
        assert await reading == whole_text(PROMPT, 4)


async def test_a_full_class_refuses_more() -> None:
    async with serving() as (service, _, prefill):
        reading = [asyncio.create_task(read(service, asked(tenant="heavy"))) for _ in range(4)]
        await until(lambda: counted(service, "kvferry_admission_waiting") == 4)
        with pytest.raises(Overloaded, match="4 requests wait"):
            await read(service, asked(tenant="heavy"))
        light = asyncio.create_task(read(service, asked(tenant="light")))
        outcomes = asyncio.gather(*reading, return_exceptions=True)
        await until(lambda: counted(service, "kvferry_refused_total", reason="queue_full") == 2)
        prefill.load["waiting_tokens"] = IDLE
        assert await light == whole_text(PROMPT, 4)
        assert [type(each) for each in await outcomes] == [tuple, tuple, tuple, Overloaded]


async def test_tenants_take_turns_at_the_workers() -> None:
    async with serving(SLOConfig(classes=(SLOClass(),), backlog=1e-3)) as (service, _, prefill):
        reading = [asyncio.create_task(read(service, asked("", "heavy", priority=-9))) for _ in range(6)]
        await until(lambda: counted(service, "kvferry_admission_waiting") == 6)
        reading += [asyncio.create_task(read(service, asked("", "light"))) for _ in range(2)]
        await until(lambda: counted(service, "kvferry_admission_waiting") == 8)
        prefill.load["waiting_tokens"] = IDLE
        assert await asyncio.gather(*reading) == [whole_text(PROMPT, 4)] * 8
        # A request tells of its tenant by the seniority that its priority gives it.
        light = [place for place, message in enumerate(prefill.opened) if message.seniority < 10.0]
        assert light == [1, 3]
