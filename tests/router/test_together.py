"""Several continuations of one prompt, asked for together: opened as one, and from then on each goes its own way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace

import msgspec
import pytest
from scripted_workers import Fleet, ScriptedWorker, fleet_at, greedy, known, until, whole_text
from worker_facts import MODEL

from protocol.errors import InvalidRequest, InvariantViolation, NoWorkerAvailable, Overloaded
from protocol.messages import ErrorInfo, Failed
from router.config import RouterConfig
from router.front.generation import Generation, Output
from router.service import Service

PROMPT = (5, 6, 7)


def copies(n: int, max_tokens: int = 8) -> list[Generation]:
    return [Generation(PROMPT, msgspec.structs.replace(greedy(max_tokens), seed=seed)) for seed in range(n)]


@contextlib.asynccontextmanager
async def serving(**settings: object) -> AsyncIterator[tuple[Service, Fleet]]:
    config = RouterConfig(model=MODEL, tokenizer="unused", **{"worker_timeout": 30.0, **settings})  # type: ignore[arg-type]
    service = Service(config)
    await service.start()
    try:
        async with fleet_at(service.hub_endpoint) as fleet:
            yield service, fleet
        assert service.cluster()["live_requests"] == 0
    finally:
        await service.close()


async def joined(service: Service, fleet: Fleet, decode: int = 1) -> tuple[ScriptedWorker, list[ScriptedWorker]]:
    prefill = fleet.add("prefill", "p0")
    others = [fleet.add("decode", f"d{index}") for index in range(decode)]
    await known(service, decode + 1)
    return prefill, others


async def read(outputs: AsyncGenerator[Output, None]) -> tuple[int, ...]:
    return tuple([token_id async for output in outputs for token_id in output.token_ids])


async def test_one_pair_of_messages_opens_all() -> None:
    async with serving() as (service, fleet):
        prefill, (decode,) = await joined(service, fleet)
        with service.together(copies(3)) as streams:
            assert await asyncio.gather(*map(read, streams)) == [whole_text(PROMPT, 8)] * 3
        (asked,), (reserve,) = prefill.opened, decode.opened
        assert [fork.seed for fork in asked.forks] == [1, 2]
        assert asked.forks == reserve.forks
        assert len({asked.key, *(fork.key for fork in asked.forks)}) == 3
        assert prefill.cancels == decode.cancels == []


async def test_a_lost_worker_makes_each_try_again_by_itself() -> None:
    async with serving() as (service, fleet):
        prefill, decodes = await joined(service, fleet, decode=2)
        for decode in decodes:
            decode.hold = 4
        with service.together(copies(3, max_tokens=12)) as streams:
            reading = [asyncio.create_task(read(outputs)) for outputs in streams]
            await until(lambda: max(decode.told for decode in decodes) == 9)
            victim, heir = sorted(decodes, key=lambda decode: -decode.told)
            heir.hold = None
            await victim.kill()
            assert await asyncio.gather(*reading) == [whole_text(PROMPT, 12)] * 3
        assert [len(work.forks) for work in prefill.opened] == [2, 0, 0, 0]
        assert {work.key.attempt for work in heir.opened} == {1}


async def test_who_closes_one_cancels_that_one_and_who_leaves_cancels_the_rest() -> None:
    # A worker that a busy machine holds up for half a second is not lost here: its requests would begin anew.
    async with serving(worker_timeout=60.0) as (service, fleet):
        prefill, (decode,) = await joined(service, fleet)
        decode.hold = 3
        with service.together(copies(3)) as (first, _, _):
            await anext(first)
            await first.aclose()
            (asked,) = prefill.opened
            # A token that was on its way to nobody is answered with a further cancel.
            await until(lambda: {*decode.cancels} == {asked.key})
            assert service.cluster()["live_requests"] == 2
        # Nobody ever read the other two.
        await until(lambda: {*decode.cancels} == {asked.key, *(fork.key for fork in asked.forks)})


async def test_a_refusal_reaches_each() -> None:
    async with serving() as (service, fleet):
        prefill, _ = await joined(service, fleet)
        prefill.refuse = InvalidRequest("no such thing", field="prompt")
        with service.together(copies(2)) as streams:
            results = await asyncio.gather(*map(read, streams), return_exceptions=True)
        assert [type(result) for result in results] == [InvalidRequest] * 2


async def test_without_workers_each_fails_or_waits_and_starts_by_itself() -> None:
    async with serving() as (service, _):
        with service.together(copies(2)) as streams:
            results = await asyncio.gather(*map(read, streams), return_exceptions=True)
        assert [type(result) for result in results] == [NoWorkerAvailable] * 2
    async with serving(worker_wait_first=10.0) as (service, fleet):
        with service.together(copies(2)) as streams:
            reading = [asyncio.create_task(read(outputs)) for outputs in streams]
            await asyncio.sleep(0)
            await joined(service, fleet)
            assert await asyncio.gather(*reading) == [whole_text(PROMPT, 8)] * 2


async def test_what_cannot_go_together_is_refused_and_nothing_is_left() -> None:
    async with serving(max_requests=3) as (service, fleet):
        await joined(service, fleet)
        other = [*copies(2), Generation((9, 9), greedy(8))]
        for generations, error in ((copies(4), Overloaded), (other, InvariantViolation), ([], InvariantViolation)):
            with pytest.raises(error), service.together(generations):
                pass
            assert service.cluster()["live_requests"] == 0
        salted = [copies(1)[0], Generation(PROMPT, greedy(8), cache_salt="b")]
        scored = [copies(1)[0], Generation(PROMPT, greedy(8), prompt_logprobs=1)]
        for generations in (salted, scored):
            with pytest.raises(InvariantViolation), service.together(generations):
                pass


async def reckoned(service: Service, name: str) -> tuple[float, float]:
    """Prompt tokens and sequences that are ahead of a request: what one more is told of, that then leaves."""
    asked = service.generate(replace(copies(1)[0], name=name))
    waiting = asyncio.create_task(anext(asked))
    await until(lambda: bool(service.explain(name)))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asked.aclose()
    (decision,) = service.explain(name)
    return decision["prefill_candidates"][0]["queue_tokens"], decision["decode_candidates"][0]["running"]


async def test_what_is_over_is_ahead_of_nobody_however_it_ended() -> None:
    async with serving(worker_timeout=60.0) as (service, fleet):
        prefill, (decode,) = await joined(service, fleet)
        decode.hold = 3
        with service.together(copies(3)) as streams:
            await asyncio.gather(*map(anext, streams))
            assert await reckoned(service, "three") == (0, 3), "the prompt is through"
            await streams[1].aclose()
            assert await reckoned(service, "two") == (0, 2), "of those that go together each ends by itself"
            decode.hold = None
            await asyncio.gather(read(streams[0]), read(streams[2]))
        assert await reckoned(service, "none") == (0, 0)
        prefill.deaf = True
        with service.together(copies(2)) as streams:
            reading = [asyncio.create_task(read(outputs)) for outputs in streams]
            await until(lambda: len(prefill.opened[-1].forks) == 1)
            assert await reckoned(service, "one prompt") == (3, 2)
            reading[0].cancel()
            await asyncio.gather(reading[0], return_exceptions=True)
            assert await reckoned(service, "still wanted") == (3, 1)
            reading[1].cancel()
            await asyncio.gather(reading[1], return_exceptions=True)
        assert await reckoned(service, "nobody") == (0, 0)


async def test_a_failed_attempt_is_ahead_of_nobody_while_the_next_one_runs() -> None:
    async with serving(worker_timeout=60.0) as (service, fleet):
        _, decodes = await joined(service, fleet, decode=2)
        for decode in decodes:
            decode.hold = 3
        reading = asyncio.create_task(read(service.generate(copies(1, max_tokens=12)[0])))
        await until(lambda: max(decode.told for decode in decodes) == 2)
        victim = max(decodes, key=lambda decode: decode.told)
        victim.send(Failed(key=victim.opened[0].key, error=ErrorInfo(code="engine_failure", message="no")))
        heir = min(decodes, key=lambda decode: decode.told)
        await until(lambda: len(heir.opened) == 1)
        asked = service.generate(replace(copies(1)[0], name="probe"))
        await anext(asked)
        await asked.aclose()
        (decision,) = service.explain("probe")
        running = {each["worker"]: each["running"] for each in decision["decode_candidates"]}
        assert running == {victim.peer.name: 0, heir.peer.name: 1}
        for decode in decodes:
            decode.hold = None
        assert await reading == whole_text(PROMPT, 12)
