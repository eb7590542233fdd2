"""Everything that is measured, up and ready: workers in processes of their own, and a router for each way to use them.

The prefill worker has the first core and the decode worker the second, or the other way round: two cores of a machine
are seldom equally fast. The engine that does both has the two of them, with a thread for each.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cluster.bench.worker_process import MODEL, worker_process
from protocol.errors import ConfigError, StartFailed
from router.config import RouterConfig
from router.local_prefill import LocalPrefill
from router.service import Service

READY_IN = 120.0
CORES = 2


@dataclass(frozen=True, slots=True)
class Stage:
    """The ways.

    Attributes:
        apart: prefill worker and decode worker.
        here: the same decode worker, which prefills too.
        together: one worker on both cores that does both, by its budget of tokens per step.
        apart_pids: processes of the prefill and of the decode worker.
    """

    apart: Service
    here: Service
    together: dict[int, Service]
    apart_pids: list[int]

    def place(self, cores: tuple[int, ...]) -> None:
        """Hold the prefill worker to the first of ``cores``, and the decode worker to the second."""
        for pid, core in zip(self.apart_pids, cores, strict=True):
            for thread in psutil.Process(pid).threads():
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    os.sched_setaffinity(thread.id, {core})


def two_cores() -> tuple[int, ...]:
    """The CPUs that are used.

    Raises:
        ConfigError: this process has only one.
    """
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < CORES:
        raise ConfigError(f"two cores are wanted, one for prefill and one for decode; this process has {len(mine)}")
    return tuple(mine[:CORES])


@asynccontextmanager
async def staged(
    model: Path, *, cores: tuple[int, ...], capacity: int, chunk: int, step_tokens: tuple[int, ...]
) -> AsyncIterator[Stage]:
    """Bring everything up, and down at the end.

    Args:
        model: a Hugging Face directory.
        cores: one for prefill, one for decode.
        capacity: tokens that each pool holds.
        chunk: tokens of a step of the prefill worker.
        step_tokens: budgets of the engines that do both; for each there is one.

    Raises:
        StartFailed: a worker is not ready in time.
    """
    engine: dict[str, Any] = {
        "model": str(model),
        "num_blocks": capacity // 16 + 1,
        "max_batch_tokens": chunk,
        "prefix_cache": False,
    }

    async with AsyncExitStack() as stack:

        async def router(mode: LocalPrefill) -> Service:
            service = Service(
                RouterConfig(model=MODEL, tokenizer=str(model), worker_timeout=READY_IN, local_prefill=mode)
            )
            await service.start()
            stack.push_async_callback(service.close)
            return service

        async def worker(role: str, name: str, on: tuple[int, ...], services: list[Service], **own: int) -> int:
            order = {
                "role": role,
                "name": name,
                "engine": {**engine, "threads": len(on)},
                "routers": [service.hub_endpoint for service in services],
                "cores": list(on),
                **own,
            }
            return await stack.enter_async_context(worker_process(order))

        apart, here = await router("never"), await router("always")
        stage = Stage(apart, here, {budget: await router("always") for budget in step_tokens}, [])
        stage.apart_pids.append(await worker("prefill", "prefill", cores[:1], [apart]))
        stage.apart_pids.append(await worker("decode", "decode", cores[1:], [apart, here]))
        for budget, service in stage.together.items():
            await worker("decode", f"both-{budget}", cores, [service], step_tokens=budget)
        services = (stage.apart, stage.here, *stage.together.values())
        try:
            async with asyncio.timeout(READY_IN):
                while not all(service.health().ready for service in services):  # noqa: ASYNC110 -- sets no event
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            raise StartFailed(f"the workers were not ready in {READY_IN:g} s") from error
        yield stage
