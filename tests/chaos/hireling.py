"""The life of a prefill or decode worker in the soak; ``nursery.py`` starts it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import engine.stepper  # noqa: F401 -- imports torch: once for all, before the fork
from decode_worker.config import DecodeConfig
from decode_worker.worker import DecodeWorker
from engine.config import EngineConfig
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker


def _make(role: str, settings: dict[str, Any]) -> PrefillWorker | DecodeWorker:
    settings["engine"] = EngineConfig(**settings["engine"])
    settings["routers"] = tuple(settings["routers"])
    if role == "prefill":
        return PrefillWorker(PrefillConfig(**settings))
    return DecodeWorker(DecodeConfig(**settings))


async def live(order: dict[str, Any], reader: asyncio.StreamReader, say: Callable[..., None]) -> None:
    worker = _make(order["role"], order["settings"])
    await worker.start()
    say(word="ready", about="me")
    async for line in reader:
        load, words = worker.load(), json.loads(line)
        worker.pool.check_integrity()
        say(
            word="look",
            about=words["about"],
            unsettled=load.pool.total - load.pool.free - load.pool.cached - load.pool.reserved,
            draining=load.pool.draining,
            open=load.open_leases + load.open_imports + load.waiting + load.running,
        )
    await worker.stop()
