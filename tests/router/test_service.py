"""The service on a real hub, with workers that follow a script."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families
from scripted_workers import Fleet, ScriptedWorker, fleet_at, greedy, known, until, whole_text
from worker_facts import MODEL

from protocol.codec import HEADER
from protocol.errors import (
    AttemptsExhausted,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailure,
    NoWorkerAvailable,
    Overloaded,
)
from protocol.ids import RequestKey
from protocol.messages import Cancel, Tokens
from router.config import RouterConfig
from router.front.generation import Generation, Output, Outputs
from router.service import Service

PROMPT = (3, 4, 5, 6)


@contextlib.asynccontextmanager
async def serving(**settings: object) -> AsyncIterator[tuple[Service, Fleet]]:
    config = RouterConfig(model=MODEL, tokenizer="unused", **{"worker_timeout": 60.0, **settings})  # type: ignore[arg-type]
    before = asyncio.all_tasks()
    service = Service(config)
    await service.start()
    try:
        async with fleet_at(service.hub_endpoint) as fleet:
            yield service, fleet
    finally:
        await service.close()
    assert asyncio.all_tasks() <= before, "no task is left"


async def pair(service: Service, fleet: Fleet) -> tuple[ScriptedWorker, ScriptedWorker]:
    workers = fleet.add("prefill", "p0"), fleet.add("decode", "d0")
    await known(service, 2)
    return workers


async def two_by_two(service: Service, fleet: Fleet) -> list[ScriptedWorker]:
    workers = [fleet.add(role, f"{role[0]}{index}") for role in ("prefill", "decode") for index in (0, 1)]  # type: ignore[arg-type]
    await known(service, 4)
    return workers


def stream(service: Service, max_tokens: int = 8, timeout: float | None = None) -> Outputs:
    return service.generate(Generation(PROMPT, greedy(max_tokens), timeout=timeout))


async def whole(outputs: Outputs) -> tuple[tuple[int, ...], Output]:
    tokens: list[int] = []
    last = Output(())
    async for output in outputs:
        tokens += output.token_ids
        last = output
    return tuple(tokens), last


def sample(service: Service, name: str, **labels: str) -> float:
    total = 0.0
    for family in text_string_to_metric_families(service.metrics().decode()):
        for found in family.samples:
            if found.name == name and labels.items() <= found.labels.items():
                total += found.value
    return total


async def test_many_requests_over_two_by_two_give_the_right_text() -> None:
    async with serving(policy="round_robin") as (service, fleet):
        prefill, other_prefill, decode, other_decode = await two_by_two(service, fleet)
        prompts = [(index, index + 1, 7) for index in range(40)]
        answers = await asyncio.gather(*(whole(service.generate(Generation(prompt, greedy(6)))) for prompt in prompts))
        assert [tokens for tokens, _ in answers] == [whole_text(prompt, 6) for prompt in prompts]
        assert {last.finish_reason for _, last in answers} == {"length"}
        assert all(len(worker.opened) == 20 for worker in (prefill, other_prefill, decode, other_decode))
        assert service.cluster()["live_requests"] == 0
        assert sample(service, "kvferry_requests_total", outcome="finished", code="length") == 40
        assert sample(service, "kvferry_remote_prefills_total") == sample(service, "kvferry_handoffs_total") == 40
        assert sample(service, "kvferry_output_tokens_total") == 240
        assert sample(service, "kvferry_ttft_seconds_count") == sample(service, "kvferry_tpot_seconds_count") == 40


async def test_the_last_output_carries_the_report() -> None:
    async with serving() as (service, fleet):
        await pair(service, fleet)
        _, last = await whole(stream(service))
        report = last.report
        assert report is not None
        assert (report.attempts, report.cached_tokens, report.kv_blocks, report.kv_bytes) == (1, 1, 2, 512)
        assert (report.prefill_worker, report.decode_worker, report.transport) == ("p0", "d0", "inproc")
        assert 0 < report.ttft_s < 5
        assert report.decode_s > 0


async def test_one_token_never_reaches_a_decode_worker() -> None:
    async with serving() as (service, fleet):
        prefill, decode = await pair(service, fleet)
        assert (await whole(stream(service, max_tokens=1)))[0] == whole_text(PROMPT, 1)
        assert len(prefill.opened) == 1
        assert decode.opened == []


async def test_a_decode_worker_killed_in_mid_stream_changes_no_token() -> None:
    # The end of its connection tells, long before its silence could.
    async with serving() as (service, fleet):
        *_, decode, other = await two_by_two(service, fleet)
        decode.hold = other.hold = 4
        outputs = stream(service, max_tokens=12)
        tokens = list((await anext(outputs)).token_ids)
        await until(lambda: decode.told + other.told == 3)
        victim, heir = (decode, other) if decode.opened else (other, decode)
        heir.hold = None
        await victim.kill()
        rest, last = await whole(outputs)
        assert (*tokens, *rest) == whole_text(PROMPT, 12)
        assert last.report is not None
        assert last.report.attempts == 2
        assert last.report.decode_worker == heir.peer.name
        (reserve,) = heir.opened
        assert reserve.emitted == 4
        assert sample(service, "kvferry_retries_total", code="worker_lost") == 1
        assert sample(service, "kvferry_worker_up", worker=victim.peer.name) == 0


async def test_a_worker_that_only_stood_still_changes_nothing_when_it_resumes() -> None:
    async with serving(worker_timeout=0.5) as (service, fleet):
        *_, decode, other = await two_by_two(service, fleet)
        decode.hold = other.hold = 3
        outputs = stream(service, max_tokens=10)
        tokens = list((await anext(outputs)).token_ids)
        await until(lambda: decode.told + other.told == 2)
        still, heir = (decode, other) if decode.opened else (other, decode)
        still.silent = True
        await until(lambda: bool(heir.opened))
        still.silent, still.hold = False, None
        key = still.opened[0].key
        still.send(Tokens(key=key, start=3, token_ids=(999,)))
        await until(lambda: sample(service, "kvferry_late_messages_total") > 0)
        heir.hold = None
        rest, _ = await whole(outputs)
        assert (*tokens, *rest) == whole_text(PROMPT, 10)
        await until(lambda: still.cancels.count(key) >= 1)


async def test_a_prefill_worker_killed_before_its_token_is_tried_elsewhere() -> None:
    async with serving() as (service, fleet):
        prefill, other, *_ = await two_by_two(service, fleet)
        prefill.deaf = other.deaf = True
        answer = asyncio.create_task(whole(stream(service)))
        await until(lambda: bool(prefill.opened or other.opened))
        victim, heir = (prefill, other) if prefill.opened else (other, prefill)
        heir.deaf = False
        await victim.kill()
        assert (await answer)[0] == whole_text(PROMPT, 8)


async def test_a_worker_that_comes_back_serves_the_retry() -> None:
    async with serving() as (service, fleet):
        _, decode = await pair(service, fleet)
        decode.hold = 3
        outputs = stream(service)
        tokens = list((await anext(outputs)).token_ids)
        await until(lambda: decode.told == 2)
        await decode.kill()
        successor = fleet.add("decode", "d0")
        rest, _ = await whole(outputs)
        assert (*tokens, *rest) == whole_text(PROMPT, 8)
        assert successor.peer.incarnation > decode.peer.incarnation
        assert len(successor.opened) == 1


async def test_leaving_early_cancels_both_legs() -> None:
    async with serving() as (service, fleet):
        prefill, decode = await pair(service, fleet)
        decode.hold = 2
        outputs = stream(service)
        await anext(outputs)
        await outputs.aclose()
        # A token that was on its way to nobody is answered with a further cancel.
        await until(lambda: {*prefill.cancels} == {*decode.cancels} == {prefill.opened[0].key})
        assert service.cluster()["live_requests"] == 0
        assert sample(service, "kvferry_requests_total", outcome="cancelled") == 1


async def test_having_all_that_is_wanted_ends_both_legs_and_counts_as_finished() -> None:
    async with serving() as (service, fleet):
        prefill, decode = await pair(service, fleet)
        decode.hold = 2
        outputs = stream(service)
        await anext(outputs)
        with pytest.raises(StopAsyncIteration):
            await outputs.asend("stop")
        with service.together([Generation(PROMPT, greedy(8))] * 2) as (one, other):
            await anext(one)
            await anext(other)
            with pytest.raises(StopAsyncIteration):
                await one.asend("tool_calls")
            assert service.cluster()["live_requests"] == 1
        assert service.cluster()["live_requests"] == 0
        # A token that was on its way to nobody is answered with a further cancel.
        await until(lambda: len({*prefill.cancels}) == len({*decode.cancels}) == 3)
        counted = {code: sample(service, "kvferry_requests_total", code=code) for code in ("stop", "tool_calls")}
        assert counted == {"stop": 1, "tool_calls": 1}
        assert sample(service, "kvferry_requests_total", outcome="cancelled") == 1
        assert sample(service, "kvferry_e2e_seconds_count") == 2


async def test_leaving_before_the_first_token_cancels_both_legs() -> None:
    async with serving() as (service, fleet):
        prefill, decode = await pair(service, fleet)
        prefill.deaf = True
        answer = asyncio.create_task(whole(stream(service)))
        await until(lambda: bool(prefill.opened and decode.opened))
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        await until(lambda: len(prefill.cancels) == len(decode.cancels) == 1)


async def test_tokens_for_nobody_are_answered_with_a_cancel() -> None:
    async with serving() as (service, fleet):
        _, decode = await pair(service, fleet)
        key = RequestKey("of-an-earlier-router", 0)
        decode.send(Tokens(key=key, start=5, token_ids=(1,)))
        await until(lambda: decode.cancels == [key])


async def test_an_error_that_no_retry_mends_reaches_the_client() -> None:
    async with serving() as (service, fleet):
        prefill, decode = await pair(service, fleet)
        prefill.deaf = True
        decode.refuse = ContextLengthExceeded("12 tokens do not fit", field="max_tokens")
        with pytest.raises(ContextLengthExceeded) as caught:
            await whole(stream(service))
        assert (caught.value.message, caught.value.field) == ("12 tokens do not fit", "max_tokens")
        await until(lambda: len(prefill.cancels) == 1)


async def test_attempts_are_bounded() -> None:
    async with serving(max_attempts=3) as (service, fleet):
        prefill, _ = await pair(service, fleet)
        prefill.refuse = EngineFailure("out of luck")
        with pytest.raises(AttemptsExhausted, match=r"3 attempts failed.*out of luck"):
            await whole(stream(service))
        assert [each.key.attempt for each in prefill.opened] == [0, 1, 2]


async def test_the_time_limit_holds_and_closes_both_legs() -> None:
    async with serving() as (service, fleet):
        prefill, decode = await pair(service, fleet)
        prefill.deaf = True
        with pytest.raises(DeadlineExceeded):
            await whole(stream(service, timeout=0.2))
        await until(lambda: len(prefill.cancels) == len(decode.cancels) == 1)


async def test_without_workers_a_request_fails_at_once() -> None:
    async with serving(worker_wait=60.0) as (service, fleet):
        with pytest.raises(NoWorkerAvailable, match="no prefill worker"):
            await whole(stream(service))
        fleet.add("prefill", "p0")
        await until(lambda: service.health().prefill_workers == 1)
        health = service.health()
        assert (health.ready, health.detail) == (False, "no decode worker is available")
        with pytest.raises(NoWorkerAvailable, match="no decode worker"):
            await whole(stream(service))


async def test_a_first_attempt_waits_for_workers_when_told_to() -> None:
    async with serving(worker_wait_first=10.0) as (service, fleet):
        answer = asyncio.create_task(whole(stream(service)))
        await until(lambda: service.cluster()["live_requests"] == 1)
        await pair(service, fleet)
        assert (await answer)[0] == whole_text(PROMPT, 8)


async def test_a_draining_worker_finishes_what_it_has_and_gets_no_more() -> None:
    async with serving() as (service, fleet):
        _, _, decode, other = await two_by_two(service, fleet)
        decode.hold = other.hold = 3
        outputs = stream(service)
        await anext(outputs)
        await until(lambda: decode.told + other.told == 2)
        leaving, staying = (decode, other) if decode.opened else (other, decode)
        leaving.load["draining"] = True
        await until(lambda: "draining" in [each["state"] for each in service.cluster()["workers"]])
        leaving.hold = staying.hold = None
        await whole(outputs)
        for _ in range(3):
            await whole(stream(service))
        assert (len(leaving.opened), len(staying.opened)) == (1, 3)


async def test_live_requests_are_bounded() -> None:
    async with serving(max_requests=2) as (service, fleet):
        _, decode = await pair(service, fleet)
        decode.hold = 2
        first, second = stream(service), stream(service)
        await asyncio.gather(anext(first), anext(second))
        with pytest.raises(Overloaded, match="bound is 2"):
            await anext(stream(service))
        await first.aclose()
        third = stream(service)
        await anext(third)
        await asyncio.gather(second.aclose(), third.aclose())


async def test_a_slow_reader_gets_all_in_one_piece() -> None:
    async with serving() as (service, fleet):
        _, decode = await pair(service, fleet)
        decode.hold = 2
        outputs = stream(service, max_tokens=50)
        first = await anext(outputs)
        decode.hold = None
        await until(lambda: service.cluster()["live_requests"] == 0)
        rest = [output async for output in outputs]
        assert len(rest) == 1
        assert (*first.token_ids, *rest[0].token_ids) == whole_text(PROMPT, 50)


async def test_bad_frames_are_counted_and_stop_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    async with serving() as (service, fleet):
        _, decode = await pair(service, fleet)
        context = zmq.asyncio.Context()
        intruder = context.socket(zmq.DEALER)
        intruder.connect(service.hub_endpoint)
        frames = [b"", b"\x00", b"KF", HEADER, HEADER + b"\xc1", b"KF\x63rest", HEADER + b"\x91" * 5000]
        for frame in frames:
            await intruder.send(frame)
        await intruder.send_multipart([b"two", b"parts"])
        decode.send(Cancel(key=RequestKey("x", 0)))
        await until(lambda: sample(service, "kvferry_bad_frames_total") == len(frames) + 2)
        assert (await whole(stream(service)))[0] == whole_text(PROMPT, 8)
        assert service.health().ready
        intruder.close(linger=0)
        context.destroy(linger=0)


async def test_closing_fails_what_is_open_and_tells_the_workers() -> None:
    async with serving() as (service, fleet):
        prefill, decode = await pair(service, fleet)
        decode.hold = 2
        outputs = stream(service)
        await anext(outputs)
        await service.close()
        with pytest.raises(NoWorkerAvailable, match="stopping"):
            await whole(outputs)
        await until(lambda: len(prefill.cancels) == len(decode.cancels) == 1)
        with pytest.raises(NoWorkerAvailable, match="not running"):
            await whole(stream(service))
        assert not service.health().ready
        await service.close()


async def test_metrics_speak_of_each_worker() -> None:
    async with serving() as (service, fleet):
        fleet.add("prefill", "p0", kv_bytes=4096, kv_blocks=2, open_leases=3)
        fleet.add("decode", "d0", running=5, open_imports=1)
        await until(lambda: service.health().ready)
        counts = {
            state: sample(service, "kvferry_pool_blocks", worker="p0", role="prefill", state=state)
            for state in ("free", "active", "cached", "exported", "importing", "draining", "reserved", "total")
        }
        assert counts.pop("total") == sum(counts.values()) == 64
        assert sample(service, "kvferry_pool_leaked_blocks", worker="p0") == 0
        assert sample(service, "kvferry_kv_bytes_total", worker="p0", role="prefill") == 4096
        assert sample(service, "kvferry_kv_blocks_total", worker="p0") == 2
        assert sample(service, "kvferry_worker_up", worker="d0", role="decode") == 1
        assert sample(service, "kvferry_open_leases", worker="p0") == 3
        assert sample(service, "kvferry_running_sequences", worker="d0") == 5


async def test_the_cluster_view_names_workers_but_no_address() -> None:
    async with serving() as (service, fleet):
        await pair(service, fleet)
        view = service.cluster()
        assert [(each["name"], each["role"], each["state"]) for each in view["workers"]] == [
            ("d0", "decode", "live"),
            ("p0", "prefill", "live"),
        ]
        assert "tcp://" not in str(view)
        assert service.max_model_len == 4096
