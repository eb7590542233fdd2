"""Cancels, deaths, full pools and restarts: the text stays right, and every pool goes back to its baseline."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from oracle import Oracle
from pace import allowed
from rack import Answer, Rack, rack, until

from decode_worker.worker import DecodeWorker
from engine.batch import Chunk, Draw
from engine.layer_watch import LayerWatch
from prefill_worker.worker import PrefillWorker
from protocol.errors import ContextLengthExceeded, InvalidRequest, KVFerryError, NoWorkerAvailable
from router.config import RouterConfig
from router.service import Service


def prompt_of(oracle: Oracle, length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, oracle.vocab_size) for _ in range(length)]


class Gate:
    """Holds a worker's engine steps until it is opened: the way to stop a request in a known stage."""

    def __init__(self, worker: PrefillWorker | DecodeWorker, *, open_for: int = 0) -> None:
        self._open = asyncio.Event()
        self._free_steps = open_for
        self.held = 0
        self._execute = worker._stepper.execute
        worker._stepper.execute = self._held  # type: ignore[method-assign]

    async def _held(
        self, chunks: Sequence[Chunk], *watch: LayerWatch, begun: Callable[[], object] | None = None
    ) -> Sequence[Draw | None]:
        if self._free_steps:
            self._free_steps -= 1
        else:
            self.held += 1
            if begun is not None:  # it has, and stands
                begun()
                begun = None
            await self._open.wait()
        return await self._execute(chunks, *watch, begun=begun)

    def open(self) -> None:
        self._open.set()


async def check_alive(running: Rack, oracle: Oracle, seed: int = 1) -> None:
    prompt = prompt_of(oracle, 11, seed)
    assert (await running.ask(prompt)).token_ids == oracle.greedy(prompt, 12)


@pytest.mark.parametrize("stage", ["queued", "prefilling", "granted", "half shipped", "landed", "decoding"])
async def test_cancel_at_each_stage(tiny_llama_dir: Path, tiny_oracle: Oracle, stage: str) -> None:
    async with rack(tiny_llama_dir, engine={"max_sequences": 1}) as running:
        (prefill,), (decode,) = running.prefill, running.decode
        gates: list[Gate] = []
        others: list[asyncio.Task[Answer]] = []
        prompt = prompt_of(tiny_oracle, 41)
        if stage in ("queued", "prefilling", "granted"):
            gates.append(Gate(prefill))
        if stage == "half shipped":
            gates.append(Gate(prefill, open_for=1))
        if stage in ("landed", "decoding"):
            gates.append(Gate(decode, open_for=0 if stage == "landed" else 2))
        if stage == "queued":
            others.append(asyncio.create_task(running.ask(prompt_of(tiny_oracle, 9, 5))))
            await until(lambda: gates[0].held, "the other request in its step")
        task = asyncio.create_task(running.ask(prompt))
        reached = {
            "queued": lambda: prefill.load().waiting == 1,
            "prefilling": lambda: gates[0].held == 1,
            "granted": lambda: decode.load().open_imports == 1 and gates[0].held == 1,
            "half shipped": lambda: gates[0].held == 1 and prefill.load().kv_blocks == 4,
            "landed": lambda: gates[0].held == 1 and decode.load().kv_blocks == 11,
            "decoding": lambda: gates[0].held == 1,
        }[stage]
        await until(reached, f"the stage {stage!r}")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for gate in gates:
            gate.open()
        await asyncio.gather(*others)
        await running.settle()
        # The blocks it had are wanted at once by another request, whose text is right.
        await check_alive(running, tiny_oracle)


async def test_a_hundred_refusals_in_a_row_leave_nothing(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    async with rack(tiny_llama_dir) as running:
        free = [worker.load().pool.free for worker in running.workers()]
        for index in range(100):
            with pytest.raises(InvalidRequest):
                await running.ask([5, 6, tiny_oracle.vocab_size + index])
        await running.settle(allowed(1.0))
        assert [worker.load().pool.free for worker in running.workers()] == free
        with pytest.raises(ContextLengthExceeded):
            await running.ask(prompt_of(tiny_oracle, 600))
        await running.settle(allowed(1.0))
        await check_alive(running, tiny_oracle)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 7}], ids=["greedy", "seeded"])
async def test_a_decode_worker_dies_in_mid_stream(
    tiny_llama_dir: Path, tiny_oracle: Oracle, sampling: dict[str, object]
) -> None:
    prompt = prompt_of(tiny_oracle, 14)
    async with rack(tiny_llama_dir, decode=2, router={"worker_timeout": 1.0}) as running:
        truth = (await running.ask(prompt, max_tokens=24, **sampling)).token_ids
        gates = [Gate(worker, open_for=5) for worker in running.decode]
        task = asyncio.create_task(running.ask(prompt, max_tokens=24, **sampling))
        await until(lambda: any(gate.held for gate in gates), "a stream in mid-way")
        victim = next(index for index, gate in enumerate(gates) if gate.held)
        dead = running.decode.pop(victim)
        await dead.stop()
        for gate in gates:
            gate.open()
        answer = await task
        assert answer.token_ids == truth
        assert answer.report is not None
        assert answer.report.attempts == 2


async def test_a_prefill_worker_dies_in_mid_prefill(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    prompt = prompt_of(tiny_oracle, 41)
    async with rack(tiny_llama_dir, prefill=2, router={"worker_timeout": 1.0}) as running:
        gates = [Gate(worker, open_for=1) for worker in running.prefill]
        bystander = prompt_of(tiny_oracle, 9, 4)
        task = asyncio.create_task(running.ask(prompt))
        await until(lambda: any(gate.held for gate in gates), "a prompt half computed")
        victim = next(index for index, gate in enumerate(gates) if gate.held)
        dead = running.prefill.pop(victim)
        stopping = asyncio.create_task(dead.stop())
        for gate in gates:
            gate.open()
        answer, other = await asyncio.gather(task, running.ask(bystander))
        await stopping
        assert answer.token_ids == tiny_oracle.greedy(prompt, 12)
        assert other.token_ids == tiny_oracle.greedy(bystander, 12)


async def test_a_lease_whose_reader_is_gone_expires_and_the_request_goes_on(
    tiny_llama_dir: Path, tiny_oracle: Oracle
) -> None:
    prompt = prompt_of(tiny_oracle, 22)
    truth = tiny_oracle.greedy(prompt, 12)
    # The router is slow to notice the death, so it is the lease that ends the attempt.
    async with rack(tiny_llama_dir, decode=2, router={"worker_timeout": 60.0, "lease_ttl": 0.5}) as running:
        gate = Gate(running.prefill[0])
        task = asyncio.create_task(running.ask(prompt))
        await until(lambda: any(worker.load().open_imports for worker in running.decode), "a grant")
        victim = next(index for index, worker in enumerate(running.decode) if worker.load().open_imports)
        dead = running.decode.pop(victim)
        await dead.stop()
        begun = time.monotonic()
        gate.open()
        answer = await task
        assert time.monotonic() - begun < allowed(30.0), "it was the router's patience that ended, not the lease"
        assert answer.token_ids == truth
        await running.settle(allowed(5.0))


async def test_a_reservation_that_waits_longer_than_the_lease(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    first, second = prompt_of(tiny_oracle, 30), prompt_of(tiny_oracle, 31, 1)
    truths = [tiny_oracle.greedy(prompt, 12) for prompt in (first, second)]
    async with rack(
        tiny_llama_dir, router={"lease_ttl": 0.6}, decode_engine={"num_blocks": 17, "max_model_len": 64}
    ) as running:
        gate = Gate(running.decode[0], open_for=1)
        one = asyncio.create_task(running.ask(first))
        await until(lambda: gate.held, "a running stream that fills the pool")
        two = asyncio.create_task(running.ask(second))
        await until(lambda: running.decode[0].load().waiting == 1, "a request that waits for room")
        waited = time.monotonic() + 1.5
        await until(lambda: time.monotonic() > waited, "more than twice the lease")
        gate.open()
        one_answer, answer = await asyncio.gather(one, two)
        assert [one_answer.token_ids, answer.token_ids] == truths
        assert answer.report is not None
        assert answer.report.attempts == 1


async def test_no_worker_is_one_clear_error(tiny_llama_dir: Path) -> None:
    async with rack(tiny_llama_dir, router={"worker_timeout": 0.8}) as running:
        await running.decode.pop().stop()
        await until(lambda: not running.service.health().ready, "the router to notice")
        with pytest.raises(NoWorkerAvailable):
            await running.ask([5, 6, 7])


async def test_a_router_that_starts_again_knows_every_worker_and_leaves_no_orphan(
    tiny_llama_dir: Path, tiny_oracle: Oracle
) -> None:
    async with rack(tiny_llama_dir, prefill=2, decode=2) as running:
        gates = [Gate(worker, open_for=3) for worker in running.decode]
        prompt = prompt_of(tiny_oracle, 17)
        orphan = asyncio.create_task(running.ask(prompt, max_tokens=200))
        await until(lambda: any(gate.held for gate in gates), "a stream in mid-way")
        hub = running.service.hub_endpoint
        for task in running.service.tasks:
            task.cancel()
        assert running.service._hub is not None
        running.service._hub.close()
        reborn = Service(RouterConfig(model="tiny", tokenizer=str(tiny_llama_dir), hub=hub))
        await until_bound(reborn)
        try:
            begun = time.monotonic()
            await until(lambda: reborn.health().prefill_workers == reborn.health().decode_workers == 2, "all workers")
            assert time.monotonic() - begun < allowed(2.0)
            orphan.cancel()
            await asyncio.gather(orphan, return_exceptions=True)
            for gate in gates:
                gate.open()
            old, running.service = running.service, reborn
            assert (await running.ask(prompt)).token_ids == tiny_oracle.greedy(prompt, 12)
            await running.settle()
            await old.close()
        finally:
            await reborn.close()


async def until_bound(service: Service) -> None:
    """Start a service at an address that its former life may still be letting go of."""

    limit = time.monotonic() + 5.0
    while True:
        try:
            await service.start()
        except KVFerryError:
            assert time.monotonic() < limit
            await asyncio.sleep(0.01)
        else:
            return


async def test_a_decode_worker_that_starts_again_frees_what_its_former_life_was_to_read(
    tiny_llama_dir: Path, tiny_oracle: Oracle
) -> None:
    first, second = prompt_of(tiny_oracle, 22), prompt_of(tiny_oracle, 13, 1)
    truths = [tiny_oracle.greedy(prompt, 12) for prompt in (first, second)]
    # A long lease and a patient router: only the new incarnation can tell prefill that the old one is gone.
    async with rack(tiny_llama_dir, router={"worker_timeout": 60.0, "lease_ttl": 60.0}) as running:
        (old,) = running.decode
        gate = Gate(running.prefill[0])
        one = asyncio.create_task(running.ask(first))
        await until(lambda: old.load().open_imports == 1 and gate.held == 1, "a grant")
        running.decode.clear()
        await old.stop()
        again = DecodeWorker(old.config)
        running.decode.append(again)
        await again.start()
        gate.open()
        two = await running.ask(second)
        assert two.token_ids == truths[1]
        assert (await one).token_ids == truths[0]
        await running.settle(allowed(5.0))
