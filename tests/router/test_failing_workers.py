"""A worker that beats well and fails what it is given, on a real hub."""

from __future__ import annotations

import asyncio

import pytest
from scripted_workers import until, whole_text
from test_service import PROMPT, pair, sample, serving, stream, two_by_two, whole

from protocol.errors import AttemptsExhausted, ChannelLost, EngineFailure
from router.service import Service

LIMITS = {"breaker_failures": 3, "breaker_cooldown": 0.3}


def breaker(service: Service, name: str) -> dict[str, object]:
    (worker,) = [each for each in service.cluster()["workers"] if each["name"] == name]
    return dict(worker["breaker"])


async def test_a_worker_that_keeps_failing_gets_nothing_until_it_has_served_a_probe() -> None:
    async with serving(policy="round_robin", **LIMITS) as (service, fleet):
        _, _, decode, _ = await two_by_two(service, fleet)
        decode.refuse = EngineFailure("a kernel failed")
        for _ in range(8):
            assert (await whole(stream(service)))[0] == whole_text(PROMPT, 8), "others do its work"
        assert breaker(service, "d0") == {"state": "open", "reason": "a kernel failed", "openings": 1}
        assert sample(service, "kvferry_worker_breaker_open", worker="d0", role="decode") == 1
        assert sample(service, "kvferry_worker_breaker_open", worker="d1", role="decode") == 0
        assert len(decode.opened) == 3
        # Its time is over: a request is tried on it, and fails; then another, and does not.
        while len(decode.opened) == 3:
            assert (await whole(stream(service)))[0] == whole_text(PROMPT, 8)
        assert breaker(service, "d0")["openings"] == 2
        decode.refuse = None
        while breaker(service, "d0")["state"] != "closed":
            assert (await whole(stream(service)))[0] == whole_text(PROMPT, 8)
        assert len(decode.opened) == 5, "one at a time"
        await asyncio.gather(*(whole(stream(service)) for _ in range(4)))
        assert len(decode.opened) == 7, "it has its share again"
        assert sample(service, "kvferry_worker_breaker_openings_total", worker="d0") == 2


async def test_the_last_one_left_still_gets_work() -> None:
    async with serving(max_attempts=5, breaker_failures=3, breaker_cooldown=60.0) as (service, fleet):
        prefill, _ = await pair(service, fleet)
        prefill.refuse = EngineFailure("out of luck")
        with pytest.raises(AttemptsExhausted):
            await whole(stream(service))
        assert breaker(service, "p0")["state"] == "open"
        assert service.health().ready
        prefill.refuse = None
        assert (await whole(stream(service)))[0] == whole_text(PROMPT, 8)


async def test_a_successor_on_the_same_address_works_at_once() -> None:
    async with serving(breaker_failures=3, breaker_cooldown=60.0) as (service, fleet):
        prefill, other, decode, _ = await two_by_two(service, fleet)
        await decode.kill()
        await until(lambda: service.health().decode_workers == 1)
        prefill.refuse = other.refuse = ChannelLost("a cable is broken")
        with pytest.raises(AttemptsExhausted):
            await whole(stream(service))
        with pytest.raises(AttemptsExhausted):
            await whole(stream(service))
        assert breaker(service, "d1")["state"] == "open", "half of each failure is its own"
        prefill.refuse = other.refuse = None
        successor = fleet.add("decode", "d1")
        await until(lambda: breaker(service, "d1")["state"] == "closed")
        assert (await whole(stream(service)))[0] == whole_text(PROMPT, 8)
        assert len(successor.opened) == 1
