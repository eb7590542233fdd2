"""A worker that takes the other role: it drains, and goes on over the engine that it had."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from oracle import Oracle
from pace import allowed
from rack import MODEL, Rack, rack, until
from test_handoff_faults import prompt_of

from decode_worker.config import DecodeConfig
from decode_worker.worker import DecodeWorker
from engine.config import EngineConfig
from engine.engine import Engine
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker
from protocol.ids import Role

CONCURRENT = 4
TOKENS = 12


class Changer:
    """One worker of a rack, whose engine outlives its roles."""

    def __init__(self, running: Rack, model: Path, engine: Engine) -> None:
        self._running, self._model, self._engine = running, model, engine
        self._incarnation = 1
        self.worker: PrefillWorker | DecodeWorker | None = None

    async def become(self, role: Role, **settings: object) -> None:
        """Drain what it is, and be this."""
        if self.worker is not None:
            self.worker.drain(20.0)
            await asyncio.wait_for(self.worker.wait(), allowed(20.0))
            pool = self.worker.load().pool
            assert (pool.used, pool.leaked) == (0, 0)
            await self.worker.stop()
            workers: list[PrefillWorker] | list[DecodeWorker] = self._running.prefill
            if isinstance(self.worker, DecodeWorker):
                workers = self._running.decode
            workers.remove(self.worker)  # type: ignore[arg-type]
        self._incarnation += 1
        given = {"dtype": "float32", "num_blocks": 65, "block_size": 4, "max_batch_tokens": 16, "threads": 1}
        common = {
            "name": "changer",
            "model_name": MODEL,
            "engine": EngineConfig(model=str(self._model), **{**given, **settings}),  # type: ignore[arg-type]
            "routers": (self._running.service.hub_endpoint,),
            "incarnation": self._incarnation,
        }
        if role == "prefill":
            worker = PrefillWorker(PrefillConfig(**common), self._engine)  # type: ignore[arg-type]
            self._running.prefill.append(worker)
            self.worker = worker
        else:
            other = DecodeWorker(DecodeConfig(**common), self._engine)  # type: ignore[arg-type]
            self._running.decode.append(other)
            self.worker = other
        await self.worker.start()

    @property
    def weights(self) -> int:
        assert self.worker is not None
        return self.worker._stepper.runner._model._embedding.data_ptr()  # type: ignore[attr-defined, no-any-return]

    def served(self) -> bool:
        assert self.worker is not None
        load = self.worker.load()
        return load.prefill_tokens > 0 if isinstance(self.worker, PrefillWorker) else load.decode_tokens > 0


async def test_under_load_a_worker_goes_from_role_to_role_and_no_request_fails(
    tiny_llama_dir: Path, tiny_oracle: Oracle
) -> None:
    prompts = [prompt_of(tiny_oracle, 9 + index, index) for index in range(CONCURRENT)]
    truths = [tiny_oracle.greedy(prompt, TOKENS) for prompt in prompts]
    engine = Engine(lasting=True)
    async with rack(tiny_llama_dir, router={"policy": "least_loaded"}) as running:
        over = asyncio.Event()

        async def client(index: int) -> None:
            while not over.is_set():
                assert (await running.ask(prompts[index])).token_ids == truths[index]

        changer = Changer(running, tiny_llama_dir, engine)
        clients = [asyncio.create_task(client(index)) for index in range(CONCURRENT)]
        await changer.become("prefill")
        await until(changer.served, "work as a prefill worker")
        place = changer.weights
        pool = changer.worker.pool  # type: ignore[union-attr]
        cache = changer.worker._stepper.runner.cache  # type: ignore[union-attr]
        for role, settings in (("decode", {}), ("prefill", {"num_blocks": 80, "block_size": 8}), ("decode", {})):
            await changer.become(role, **settings)  # type: ignore[arg-type]
            await until(changer.served, f"work as a {role} worker")
            assert changer.weights == place
            if role == "decode" and cache is not None:
                assert changer.worker._stepper.runner.cache is cache, "its memory stays mapped where nothing differs"  # type: ignore[union-attr]
                assert changer.worker.pool is not pool  # type: ignore[union-attr]
                cache = None
        seen = {worker["name"]: worker for worker in running.service.cluster()["workers"]}["changer"]
        assert (seen["role"], seen["incarnation"]) == ("decode", 5)
        over.set()
        await asyncio.gather(*clients)
        metrics = running.service.metrics().decode()
    retried = re.findall(r'kvferry_retries_total\{code="(\w+)"', metrics)
    assert {*retried} <= {"worker_draining"}, "only refusals are retried"
    engine.close()
