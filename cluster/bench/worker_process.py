"""A worker in a process of its own, for benchmarks that have a router in theirs.

Usage by itself: ``python -m cluster.bench.worker_process ORDER``; ORDER is JSON, the worker's configuration with its
``role`` ("prefill" or "decode") and, as ``engine``, the engine's; ``cores`` may hold it to some CPUs. It ends when its
standard input does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from cluster.collector import hold, keep
from cluster.event_loop import new_loop

MODEL = "measured"
"""Name that the workers serve their model by."""


@asynccontextmanager
async def worker_process(order: dict[str, Any], command: Sequence[str] = ()) -> AsyncIterator[int]:
    """One worker, which ends with this process; ``command`` is put before its own. Gives its process id."""
    words = [*command, sys.executable, "-m", "cluster.bench.worker_process", json.dumps(order)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(order["engine"]["threads"])}
    process = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.PIPE, env=environment)
    try:
        yield process.pid
    finally:
        # It may have ended by itself, or with whatever ended this one.
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def serve(order: dict[str, Any]) -> None:
    """Be one worker until standard input ends."""
    from decode_worker.config import DecodeConfig
    from decode_worker.worker import DecodeWorker
    from engine.config import EngineConfig
    from prefill_worker.config import PrefillConfig
    from prefill_worker.worker import PrefillWorker

    engine = EngineConfig(**order.pop("engine"))
    routers = tuple(order.pop("routers"))
    role = order.pop("role")
    if cores := order.pop("cores", ()):
        os.sched_setaffinity(0, cores)
    common = {**order, "model_name": MODEL, "engine": engine, "routers": routers}
    worker = PrefillWorker(PrefillConfig(**common)) if role == "prefill" else DecodeWorker(DecodeConfig(**common))
    await worker.start()
    keep()
    await asyncio.to_thread(sys.stdin.read)
    await worker.stop()


if __name__ == "__main__":
    hold()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve(json.loads(sys.argv[1])))
