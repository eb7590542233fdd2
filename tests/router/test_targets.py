"""What cannot get its first token in time is refused when it comes, not served too late."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from front_stage import TEXT, ScriptedService, failing, serving_front
from httpx import Client
from scripted_workers import Fleet, fleet_at, greedy, until, whole_text
from test_service import sample
from worker_facts import MODEL

from protocol.errors import TargetOutOfReach
from router.config import RouterConfig
from router.front.generation import Generation
from router.service import Service
from router.tokenizer import Tokenizer

PROMPT = (3, 4, 5, 6)
BUSY = {"waiting_tokens": 100_000, "steps": 10_000, "step_per_token": 1e-3}
IDLE = {"waiting_tokens": 0, "steps": 10_000, "step_per_token": 1e-3}


@contextlib.asynccontextmanager
async def serving(**settings: object) -> AsyncIterator[tuple[Service, Fleet]]:
    service = Service(RouterConfig(model=MODEL, tokenizer="unused", **settings))  # type: ignore[arg-type]
    await service.start()
    try:
        async with fleet_at(service.hub_endpoint) as fleet:
            fleet.add("decode", "d0")
            fleet.add("prefill", "busy", **BUSY)
            await until(lambda: service.health().ready)
            yield service, fleet
    finally:
        await service.close()


async def read(service: Service, target: float | None = None) -> tuple[int, ...]:
    generation = Generation(PROMPT, greedy(4), ttft_target=target)
    return tuple([token async for output in service.generate(generation) for token in output.token_ids])


async def test_a_target_out_of_reach_is_refused_at_once_and_says_when_to_come_again() -> None:
    async with serving(ttft_target=10.0) as (service, fleet):
        with pytest.raises(TargetOutOfReach, match=r"predicted in .* s, and wanted within 10 s") as refused:
            await read(service)
        assert 60 < refused.value.retry_after < 100
        with (
            pytest.raises(TargetOutOfReach),
            service.together([Generation(PROMPT, greedy(4)), Generation(PROMPT, greedy(4))]) as both,
        ):
            await asyncio.gather(*(anext(each) for each in both))
        assert service.cluster()["live_requests"] == 0
        assert await read(service, target=1000.0) == whole_text(PROMPT, 4), "it can wait"
        fleet.add("prefill", "idle", **IDLE)
        await until(lambda: service.health().prefill_workers == 2)
        assert await read(service) == whole_text(PROMPT, 4)


async def test_without_a_target_nothing_is_refused() -> None:
    async with serving() as (service, _):
        assert await read(service) == whole_text(PROMPT, 4)
        with pytest.raises(TargetOutOfReach):
            await read(service, target=0.5)


def test_over_http_it_is_a_429_with_the_seconds(bpe_tokenizer: Tokenizer) -> None:
    service = ScriptedService(failing(TargetOutOfReach("too late", 7.2)))
    with serving_front(service, bpe_tokenizer) as url, Client(base_url=url, trust_env=False) as http:
        answer = http.post("/v1/completions", json={**TEXT, "ttft_target": 0.5})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "8")
        assert answer.json()["error"]["code"] == "target_out_of_reach"
        assert service.generations[-1].ttft_target == 0.5
        assert http.post("/v1/completions", json={**TEXT, "ttft_target": 0}).status_code == 400


@pytest.mark.parametrize("policy", ["cost", "round_robin"])
async def test_what_was_predicted_and_what_was_measured_are_both_recorded(policy: str) -> None:
    async with serving(policy=policy) as (service, _):
        report = None
        async for output in service.generate(Generation(PROMPT, greedy(4))):
            report = output.report or report
        assert report is not None
        (told,) = service.explain(report.request_id)
        predicted, measured = told["predicted"]["ttft_s"], told["measured"]["ttft_s"]
        assert predicted > 99.0 > measured > 0.0, "its worker says that it is busy, and is not"
        for name, seconds in (("predicted", predicted), ("measured", measured), ("error", predicted - measured)):
            metric = "kvferry_ttft_prediction_error_seconds" if name == "error" else f"kvferry_ttft_{name}_seconds"
            assert sample(service, f"{metric}_count", policy=policy) == 1
            assert sample(service, f"{metric}_sum", policy=policy) == pytest.approx(seconds, abs=1e-4)
