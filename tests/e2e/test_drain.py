"""A worker that leaves: nothing new comes to it, what it has ends well, whoever reads its KV is waited for."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from oracle import Oracle
from pace import allowed
from rack import Rack, rack, until
from test_handoff_faults import Gate, prompt_of

from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker

CONCURRENT = 6
TOKENS = 12


async def left(running: Rack, worker: PrefillWorker | DecodeWorker) -> None:
    """Wait until a worker that drains has left in good order, and let it go."""
    await asyncio.wait_for(worker.wait(), allowed(20.0))
    pool = worker.load().pool
    assert (pool.used, pool.leaked) == (0, 0)
    (running.prefill if isinstance(worker, PrefillWorker) else running.decode).remove(worker)  # type: ignore[arg-type]
    await worker.stop()


async def test_under_load_one_of_each_role_leaves_and_no_request_fails(
    tiny_llama_dir: Path, tiny_oracle: Oracle
) -> None:
    prompts = [prompt_of(tiny_oracle, 9 + index, index) for index in range(CONCURRENT)]
    truths = [tiny_oracle.greedy(prompt, TOKENS) for prompt in prompts]
    async with rack(tiny_llama_dir, prefill=2, decode=2) as running:
        over = asyncio.Event()
        served = [0] * CONCURRENT

        async def client(index: int) -> None:
            while not over.is_set():
                assert (await running.ask(prompts[index])).token_ids == truths[index]
                served[index] += 1

        clients = [asyncio.create_task(client(index)) for index in range(CONCURRENT)]
        await until(lambda: min(served) >= 1, "a first answer to each client")
        for worker in (running.prefill[0], running.decode[0]):
            worker.drain(20.0)
            assert worker.load().draining
            await left(running, worker)
        marks = list(served)
        await until(lambda: all(now >= then + 2 for now, then in zip(served, marks, strict=True)), "two more to each")
        over.set()
        await asyncio.gather(*clients)
        metrics = running.service.metrics().decode()
    retried = re.findall(r'kvferry_retries_total\{code="(\w+)"', metrics)
    assert {*retried} <= {"worker_draining"}, "only refusals are retried"


async def test_a_prefill_worker_waits_for_who_reads_its_blocks(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    async with rack(tiny_llama_dir, prefill=2) as running:
        long = prompt_of(tiny_oracle, 50)
        gate = Gate(running.decode[0])
        first = asyncio.create_task(running.ask(long, max_tokens=200))
        await until(lambda: running.decode[0].load().running and gate.held, "a sequence that keeps its room")
        # Decode has no room for another such prompt: the lease on its blocks waits.
        second = asyncio.create_task(running.ask(prompt_of(tiny_oracle, 230, 1), max_tokens=4))
        await until(lambda: running.decode[0].load().waiting, "a request that waits for room")
        # Decode waits for room from the request's coming on; the lease opens at the end of its first chunk.
        await until(lambda: any(worker.load().open_leases for worker in running.prefill), "its lease")
        (holder,) = [worker for worker in running.prefill if worker.load().open_leases]
        await until(lambda: not holder.load().running, "its prompt")
        holder.drain(60.0)
        waited = asyncio.create_task(holder.wait())
        await until(lambda: "draining" in str(running.service.cluster()), "the router's notice")
        assert not waited.done()
        assert holder.load().open_leases == 1
        gate.open()
        answers = await asyncio.gather(first, second)
        assert answers[1].token_ids == tiny_oracle.greedy(prompt_of(tiny_oracle, 230, 1), 4)
        assert answers[1].report is not None
        assert answers[1].report.attempts == 1
        await waited
        await left(running, holder)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_is_not_finished_in_time_goes_on_elsewhere(
    role: str, tiny_llama_dir: Path, tiny_oracle: Oracle
) -> None:
    async with rack(tiny_llama_dir, prefill=2, decode=2, router={"max_attempts": 1}) as running:
        workers: list[PrefillWorker] | list[DecodeWorker] = running.prefill if role == "prefill" else running.decode
        gates = {worker: Gate(worker) for worker in workers}
        prompt = prompt_of(tiny_oracle, 22)
        answer = asyncio.create_task(running.ask(prompt))
        await until(lambda: any(gate.held for gate in gates.values()), "a step that is held")
        (leaving,) = [worker for worker, gate in gates.items() if gate.held]
        (other,) = [worker for worker in workers if worker is not leaving]
        gates[other].open()
        leaving.drain(0.2)
        assert (await answer).token_ids == tiny_oracle.greedy(prompt, TOKENS)
        assert leaving.load().pool.active, "its step still writes the blocks"
        gates[leaving].open()
        await left(running, leaving)
        assert answer.result().report is not None
        assert answer.result().report.attempts == 2


async def test_a_request_that_crosses_the_notice_is_refused_and_goes_elsewhere(
    tiny_llama_dir: Path, tiny_oracle: Oracle
) -> None:
    async with rack(tiny_llama_dir, prefill=2, decode=2, router={"max_attempts": 1}) as running:
        # The router does not hear of it: as if all its requests had been sent before.
        for worker in (running.prefill[0], running.decode[0]):
            worker._link.announce = lambda: None  # type: ignore[method-assign]
            worker.drain(20.0)
        prompts = [prompt_of(tiny_oracle, 20, seed) for seed in range(4)]
        answers = await asyncio.gather(*(running.ask(prompt) for prompt in prompts))
        assert [answer.token_ids for answer in answers] == [tiny_oracle.greedy(each, TOKENS) for each in prompts]
        assert max(answer.report.attempts for answer in answers if answer.report is not None) > 1
        for worker in (running.prefill[0], running.decode[0]):
            await left(running, worker)
