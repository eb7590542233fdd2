"""A worker whose process beats and whose engine stands still counts as dead, until it goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from oracle import Oracle
from pace import allowed
from rack import Rack, rack, until
from test_handoff_faults import Gate, prompt_of

from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from protocol.errors import EngineFailure
from router.front.generation import GenerationReport

TOKENS = 12
PATIENT: dict[str, object] = {"step_age_bound": 1.0, "worker_wait": 20.0, "policy": "least_loaded"}
"""A step of a worker that is well takes so long on no machine that does anything else."""


def wedge_the_runner(worker: PrefillWorker | DecodeWorker) -> Callable[[], None]:
    """The engine's thread stands within its next step, until the function that is returned is called."""
    runner, gate = worker._stepper.runner, threading.Event()
    execute = runner.execute

    def stands(*args: Any) -> Any:
        gate.wait(30.0)
        return execute(*args)

    runner.execute = stands  # type: ignore[method-assign]
    return gate.set


def wedge_the_loop(worker: PrefillWorker | DecodeWorker) -> Callable[[], None]:
    """The step loop waits for something else before its next step."""
    return Gate(worker).open


async def ask_all(running: Rack, oracle: Oracle, seeds: range) -> list[GenerationReport]:
    """Right answers to several requests side by side."""
    prompts = [prompt_of(oracle, 11, seed) for seed in seeds]
    answers = await asyncio.gather(*(running.ask(prompt) for prompt in prompts))
    assert [answer.token_ids for answer in answers] == [oracle.greedy(prompt, TOKENS) for prompt in prompts]
    return [answer.report for answer in answers if answer.report is not None]


def shown(running: Rack, name: str) -> tuple[str, str]:
    (worker,) = [each for each in running.service.cluster()["workers"] if each["name"] == name]
    return worker["state"], worker["reason"]


@pytest.mark.parametrize(
    ("role", "wedge"), [("prefill", wedge_the_runner), ("decode", wedge_the_runner), ("decode", wedge_the_loop)]
)
async def test_a_wedged_worker_is_lost_and_works_again_when_it_goes_on(
    tiny_llama_dir: Path,
    tiny_oracle: Oracle,
    role: str,
    wedge: Callable[[PrefillWorker | DecodeWorker], Callable[[], None]],
) -> None:
    async with rack(tiny_llama_dir, prefill=2, decode=2, router=PATIENT) as running:
        victim = (running.prefill if role == "prefill" else running.decode)[0]
        name = victim.me.name
        release = wedge(victim)
        try:
            reports = await ask_all(running, tiny_oracle, range(4))
            assert max(report.attempts for report in reports) >= 2, "some were on the one that stands"
            state, reason = shown(running, name)
            assert state == "lost"
            assert reason.startswith("its step loop has stood for")
            # It beats on, and nothing new goes to it.
            for report in await ask_all(running, tiny_oracle, range(4, 6)):
                assert name not in (report.prefill_worker, report.decode_worker)
            assert shown(running, name)[0] == "lost"
        finally:
            release()
        await until(lambda: shown(running, name) == ("live", ""), "its return")
        await running.settle()
        reports = await ask_all(running, tiny_oracle, range(6, 14))
        assert name in {worker for report in reports for worker in (report.prefill_worker, report.decode_worker)}


async def test_one_that_stays_wedged_ends_to_be_started_again(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    options: dict[str, object] = {"wedged_after": 1.5}
    async with rack(tiny_llama_dir, decode=2, decode_transfer=options, router=PATIENT) as running:
        victim = running.decode[0]
        release = wedge_the_runner(victim)
        try:
            await ask_all(running, tiny_oracle, range(2))
            with pytest.raises(EngineFailure, match="no step has ended"):
                await asyncio.wait_for(victim.wait(), allowed(10.0))
        finally:
            release()
        running.decode.remove(victim)
        await victim.stop()
