"""Two routers ask in opposite orders: neither request may wait for the other for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path

from oracle import Oracle
from pace import allowed
from rack import MODEL, until
from test_handoff_faults import prompt_of

from decode_worker.config import DecodeConfig
from decode_worker.worker import DecodeWorker
from engine.config import EngineConfig
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker
from protocol.sampling import SamplingParams
from router.config import RouterConfig
from router.front.generation import Generation
from router.service import Service

LEASE_TTL = 0.5


async def ask(service: Service, prompt: list[int]) -> list[int]:
    generation = Generation(token_ids=tuple(prompt), sampling=SamplingParams(temperature=0.0, max_tokens=4))
    seen: list[int] = []
    async for output in service.generate(generation):
        seen += output.token_ids
    return seen


async def test_two_requests_that_hold_what_the_other_waits_for(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    first, second = prompt_of(tiny_oracle, 41), prompt_of(tiny_oracle, 42, 1)
    truths = [tiny_oracle.greedy(prompt, 4) for prompt in (first, second)]
    config = RouterConfig(model=MODEL, tokenizer=str(tiny_llama_dir), worker_timeout=15.0, lease_ttl=LEASE_TTL)
    routers = [Service(config), Service(config)]
    for service in routers:
        await service.start()
    # Each pool has room for one of the two.
    engine = EngineConfig(
        model=str(tiny_llama_dir), dtype="float32", num_blocks=15, block_size=4, max_batch_tokens=16, threads=1
    )
    hubs = tuple(service.hub_endpoint for service in routers)
    prefill = PrefillWorker(PrefillConfig(name="prefill-0", model_name=MODEL, engine=engine, routers=hubs))
    decode = DecodeWorker(DecodeConfig(name="decode-0", model_name=MODEL, engine=engine, routers=hubs))
    tasks: list[asyncio.Task[list[int]]] = []
    try:
        await prefill.start()
        await decode.start()
        await until(lambda: all(service.health().ready for service in routers), "every heartbeat")
        # The decode worker hears of the first request first, the prefill worker of the second: no network forbids it.
        held = []
        deliver, prefill._link._on_message = prefill._link._on_message, lambda *message: held.append(message)
        tasks.append(asyncio.create_task(ask(routers[0], first)))
        await until(lambda: held and decode.load().open_imports, "the first reservation")
        tasks.append(asyncio.create_task(ask(routers[1], second)))
        await until(lambda: len(held) == 2 and decode.load().waiting, "the second to wait for room")
        prefill._link._on_message = deliver
        for message in reversed(held):
            deliver(*message)
        answers = await asyncio.wait_for(asyncio.gather(*tasks), allowed(12 * LEASE_TTL))
        assert answers == truths
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for service in routers:
            await service.close()
        await prefill.stop()
        await decode.stop()
