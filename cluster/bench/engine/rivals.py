"""The rivals of our engine, each a program of its own that serves all cases.

Life cycle of an :func:`entered` list: rivals started -> turns -> ended. A rival that fails drops out and says why; the
others go on.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec

from cluster.bench.engine.case import EngineCase
from cluster.bench.rivals.contest import Invitation, OnRival, RivalState, said
from cluster.bench.rivals.process import RivalProcess, started
from protocol.errors import ConnectionFailed, KVFerryError

RIVALS: Mapping[str, str] = MappingProxyType(
    {
        "transformers": "in a process of its own",
        "vllm": "engine and scheduler in one process of its own, one step after the other, prefix caching off",
    }
)
"""Name and how it is run."""
STEPPERS = Path(__file__).with_name("steppers.py")
START_SECONDS = 900.0
"""vLLM compiles when it starts for the first time."""
TURN_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class RivalOrder:
    """What a rival is given.

    Attributes:
        model: directory.
        dtype: of weights and cache.
        device: where.
        threads: of compute.
        max_model_len: tokens of one sequence at most.
        max_sequences: in one step at most.
        kv_bytes: of its cache.
        cpu_time: whether CPU time is measured.
    """

    model: str
    dtype: str
    device: str
    threads: int
    max_model_len: int
    max_sequences: int
    kv_bytes: int
    cpu_time: bool


def environment(rival: str, python: str, threads: int) -> dict[str, str]:
    """Of a rival's process: as many threads as are wanted, no network, and what vLLM's manual asks for on CPUs."""
    settings = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    if rival != "vllm":
        return settings
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    settings |= {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    openmp = Path(python).absolute().parent.parent / "lib" / "libiomp5.so"
    if openmp.exists():
        places = f"granularity=fine,explicit,proclist=[{cores}]"
        settings |= {"LD_PRELOAD": str(openmp), "KMP_AFFINITY": places, "KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}
    return settings


class Rival:
    """One that takes part.

    Args:
        name: of :data:`RIVALS`.
        process: started, and its model loaded.
    """

    def __init__(self, name: str, process: RivalProcess) -> None:
        self.name = name
        self._process = process

    async def turn(self, case: EngineCase, steps: int) -> list[float]:
        """Seconds of each of ``steps`` steps of a decode, or of the one prefill.

        Raises:
            ConnectionFailed: it did not do so.
        """
        asked = {"batch": case.batch, "context": case.context, "steps": steps}
        try:
            async with asyncio.timeout(TURN_SECONDS):
                answer = await self._process.ask(case.kind, **asked)
            seconds = msgspec.convert(answer.get("seconds"), list[float])
        except TimeoutError as error:
            raise ConnectionFailed(f"{case} was not done in {TURN_SECONDS:.0f} seconds") from error
        except msgspec.ValidationError as error:
            raise ConnectionFailed(f"its answer is none: {error}") from error
        if not seconds or min(seconds) <= 0:
            raise ConnectionFailed(f"it says that {case} took {seconds} seconds")
        return seconds


@asynccontextmanager
async def entered(invitation: Invitation, order: RivalOrder, on_rival: OnRival) -> AsyncIterator[list[Rival]]:
    """The invited rivals that are installed; ``on_rival`` is told of each."""
    async with AsyncExitStack() as stack:
        found = []
        for name in invitation.names:
            try:
                settings = environment(name, invitation.python, order.threads)
                process = await stack.enter_async_context(started(invitation.python, settings, STEPPERS))
                async with asyncio.timeout(START_SECONDS):
                    answer = await process.ask("start", rival=name, **msgspec.to_builtins(order))
                version, how = str(answer["version"]), str(answer["settings"])
            except (KVFerryError, KeyError) as error:
                on_rival(RivalState(rival=name, reason=said(error)))
            except TimeoutError:
                on_rival(RivalState(rival=name, reason=f"it did not start in {START_SECONDS:.0f} seconds"))
            else:
                on_rival(RivalState(rival=name, version=version, settings=f"{RIVALS[name]}; {how}"))
                found.append(Rival(name, process))
        yield found
