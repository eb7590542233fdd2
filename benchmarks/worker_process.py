"""A worker in a process of its own, for benchmarks that have a router in theirs.

Usage by itself: ``python benchmarks/worker_process.py ORDER``; ORDER is JSON, the worker's configuration with its
``role`` ("prefill" or "decode") and, as ``engine``, the engine's. It ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from decode_worker.config import DecodeConfig
from decode_worker.worker import DecodeWorker
from engine.config import EngineConfig
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker

MODEL = "measured"
"""Name that the workers serve their model by."""


@asynccontextmanager
async def worker_process(order: dict[str, Any], command: Sequence[str] = ()) -> AsyncIterator[None]:
    """One worker, which ends with this process; ``command`` is put before its own."""
    words = [*command, sys.executable, __file__, json.dumps(order)]
    process = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.PIPE)
    try:
        yield
    finally:
        await process.communicate(b"")


async def serve(order: dict[str, Any]) -> None:
    """Be one worker until standard input ends."""
    engine = EngineConfig(**order.pop("engine"))
    routers = tuple(order.pop("routers"))
    role = order.pop("role")
    common = {**order, "model_name": MODEL, "engine": engine, "routers": routers}
    worker = PrefillWorker(PrefillConfig(**common)) if role == "prefill" else DecodeWorker(DecodeConfig(**common))
    await worker.start()
    await asyncio.to_thread(sys.stdin.read)
    await worker.stop()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
