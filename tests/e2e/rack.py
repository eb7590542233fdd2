"""A whole cluster in one process: a real router service, real workers, real ZeroMQ and real transports, and no Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from namespaces import Host

from decode_worker.config import DecodeConfig
from decode_worker.worker import DecodeWorker
from engine.config import EngineConfig
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker
from protocol.sampling import SamplingParams
from router.config import RouterConfig
from router.front.generation import Generation, GenerationReport
from router.service import Service

MODEL = "tiny"
DEADLINE = 30.0


async def until(condition: Callable[[], object], what: str, deadline: float = DEADLINE) -> None:
    """Wait for a condition, and fail with its name when it does not come."""
    limit = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < limit, f"{what} did not come in {deadline} s"
        await asyncio.sleep(0.005)


@dataclass
class Answer:
    """What one request gave."""

    token_ids: list[int]
    finish_reason: str | None
    report: GenerationReport | None


@dataclass
class Rack:
    """The running parts."""

    service: Service
    prefill: list[PrefillWorker]
    decode: list[DecodeWorker]

    async def ask(self, token_ids: Sequence[int], *, salt: str = "", **sampling: object) -> Answer:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **sampling})  # type: ignore[arg-type]
        answer = Answer([], None, None)
        generation = Generation(token_ids=tuple(token_ids), sampling=params, cache_salt=salt)
        async for output in self.service.generate(generation):
            answer.token_ids += output.token_ids
            answer.finish_reason = output.finish_reason
            answer.report = output.report
        return answer

    def workers(self) -> list[PrefillWorker | DecodeWorker]:
        return [*self.prefill, *self.decode]

    def at_baseline(self) -> bool:
        """Every block is free, cached or reserved, and nothing is open anywhere."""
        for worker in self.workers():
            load = worker.load()
            pool = load.pool
            if pool.free + pool.cached + pool.reserved != pool.total or pool.leaked:
                return False
            if load.open_leases or load.open_imports or load.waiting or load.running or load.swapped_blocks:
                return False
            if load.used_slots or load.empty_slots:
                return False
            worker.pool.check_integrity()
            if isinstance(worker, DecodeWorker):
                worker._swaps.book.slots.check_integrity()
            transfer = worker.transfer()
            assert (transfer.open, transfer.draining) == (0, 0), "what has ended is not counted so"
            assert transfer.opened == sum(transfer.ended.values()), "something ended twice, or uncounted"
        return True

    async def settle(self, deadline: float = DEADLINE) -> None:
        """Wait until every pool is at its baseline."""
        await until(self.at_baseline, "the baseline of every pool", deadline)


@asynccontextmanager
async def rack(
    model: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    engine: dict[str, object] | None = None,
    decode_engine: dict[str, object] | None = None,
    router: dict[str, object] | None = None,
    transfer: dict[str, object] | None = None,
    prefill_transfer: dict[str, object] | None = None,
    decode_transfer: dict[str, object] | None = None,
    decode_model: Path | None = None,
    ship_by: str = "auto",
    listen_by: str = "auto",
    hosts: Mapping[str, Host] | None = None,
) -> AsyncIterator[Rack]:
    """Bring the parts up, and check at the end that every pool went back to its baseline.

    With ``hosts`` the router and the workers are each on the host that is named for what they do. A prefill worker
    makes connections whenever it ships, so its host is this process's.
    """

    def on(host: str) -> AbstractContextManager[None]:
        return hosts[host].inside() if hosts else nullcontext()

    def bound(host: str) -> dict[str, object]:
        return {"bind_host": hosts[host].address} if hosts else {}

    settings: dict[str, object] = {
        "dtype": "float32",
        "num_blocks": 65,
        "block_size": 4,
        "max_batch_tokens": 16,
        "threads": 1,
        **(engine or {}),
    }
    # Everything shares one loop with the test, which may hold it for a while: a worker is not lost so soon.
    timing: dict[str, object] = {"worker_timeout": 15.0, **(router or {})}
    if hosts:
        timing["hub"] = f"tcp://{hosts['router'].address}:0"
    service = Service(RouterConfig(model=MODEL, tokenizer=str(model), **timing))  # type: ignore[arg-type]
    with on("router"):
        await service.start()
    routers = (service.hub_endpoint,)
    p = [
        PrefillWorker(
            PrefillConfig(
                name=f"prefill-{index}",
                model_name=MODEL,
                engine=EngineConfig(model=str(model), **settings),  # type: ignore[arg-type]
                routers=routers,
                transport=ship_by,
                **{**bound("prefill"), **(transfer or {}), **(prefill_transfer or {})},  # type: ignore[arg-type]
            )
        )
        for index in range(prefill)
    ]
    d = [
        DecodeWorker(
            DecodeConfig(
                name=f"decode-{index}",
                model_name=MODEL,
                engine=EngineConfig(model=str(decode_model or model), **{**settings, **(decode_engine or {})}),  # type: ignore[arg-type]
                routers=routers,
                transport=listen_by,
                **{**bound("decode"), **(transfer or {}), **(decode_transfer or {})},  # type: ignore[arg-type]
            )
        )
        for index in range(decode)
    ]
    running = Rack(service, p, d)
    try:
        for worker in p:
            await worker.start()
        with on("decode"):
            for other in d:
                await other.start()
        await until(
            lambda: service.health().prefill_workers == prefill and service.health().decode_workers == decode,
            "every worker's heartbeat",
        )
        yield running
        await running.settle()
    finally:
        await service.close()
        for worker in running.workers():
            await worker.stop()
