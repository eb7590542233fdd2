"""What is left of the throughput when ten times as many ask as the decode pool holds, and some of them leave.

A router, a prefill worker and a decode worker for each way to make room; the ways take turns, so what runs beside us
hits all of them alike. In each turn the same requests are made twice: as many at a time as the pool holds to their
ends, and all at once, when ``--leave`` of the clients go away after a part of their answer that chance draws. What
counts is tokens that a client got, per second; the ratio is that of the second to the first.
Usage: ``python benchmarks/oversubscription.py --model DIRECTORY`` (``kvferry model path smollm2-135m`` names one).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.bench.worker_process import MODEL, worker_process
from decode_worker.preemption import PREEMPTIONS
from protocol.sampling import SamplingParams
from router.config import RouterConfig
from router.front.generation import Generation
from router.service import Service

FIRST_ID, LAST_ID = 100, 40_000
BLOCK = 16
READY_IN = 300.0


@dataclass(frozen=True)
class Figures:
    """One turn of one way: tokens per second, and what the workers did in the crowded half of it."""

    quiet: float
    crowded: float
    swaps: int
    preemptions: int


async def client(service: Service, prompt: tuple[int, ...], output: int, leaves: int | None) -> int:
    """One request; the tokens that came before it ended or the client left."""
    sampling = SamplingParams(temperature=0.0, max_tokens=output)
    stream = service.generate(Generation(token_ids=prompt, sampling=sampling))
    got = 0
    async for part in stream:
        got += len(part.token_ids)
        if leaves is not None and got >= leaves:
            break
    await stream.aclose()
    return got


async def crowd(service: Service, options: argparse.Namespace, rng: random.Random, at_once: int, leave: float) -> float:
    """Make the requests, so many at once; tokens per second."""
    turn = asyncio.Semaphore(at_once)

    async def one(leaves: int | None) -> int:
        prompt = tuple(rng.randrange(FIRST_ID, LAST_ID) for _ in range(options.prompt))
        async with turn:
            return await client(service, prompt, options.output, leaves)

    leaving = [rng.randrange(1, options.output) if rng.random() < leave else None for _ in range(options.requests)]
    began = time.perf_counter()
    got = await asyncio.gather(*(one(leaves) for leaves in leaving))
    return sum(got) / (time.perf_counter() - began)


async def settled(service: Service) -> dict[str, Any]:
    """The decode worker's load, once every worker is idle; counts of blocks that are nobody's are looked at."""
    async with asyncio.timeout(READY_IN):
        while True:
            workers = service.cluster()["workers"]
            loads = [worker["load"] for worker in workers]
            held = [load["pool"][state] for load in loads for state in ("active", "exported", "importing", "draining")]
            busy = sum(load["running"] + load["waiting"] + load["swapped_blocks"] for load in loads)
            if not any(held) and not busy:
                assert not any(worker["leaked_blocks"] for worker in workers), "blocks were lost"
                return next(worker["load"] for worker in workers if worker["role"] == "decode")
            await asyncio.sleep(0.1)


async def measure(options: argparse.Namespace) -> dict[str, list[Figures]]:
    """Bring everything up, take the figures in turn, and bring it down."""
    blocks = -(-(options.prompt + options.output) // BLOCK)
    holds = max(1, options.requests // options.crowd)
    engine = {
        "model": str(options.model),
        "threads": 1,
        "block_size": BLOCK,
        "max_batch_tokens": 256,
        "max_sequences": 4 * holds,
        "max_model_len": options.prompt + options.output,
    }
    sizes = {"prefill": 4 * holds * blocks, "decode": holds * blocks + 1 + holds}
    async with AsyncExitStack() as stack:
        services = {}
        for way in options.ways:
            config = RouterConfig(model=MODEL, tokenizer=str(options.model), worker_timeout=READY_IN)
            services[way] = service = Service(config)
            await service.start()
            stack.push_async_callback(service.close)
            for role, num_blocks in sizes.items():
                order = {
                    "role": role,
                    "name": f"{role}-{way}",
                    "engine": {**engine, "num_blocks": num_blocks},
                    "routers": [service.hub_endpoint],
                    **({"preemption": way, "swap_bytes": options.swap_bytes} if role == "decode" else {}),
                }
                await stack.enter_async_context(worker_process(order))
        async with asyncio.timeout(READY_IN):
            while not all(service.health().ready for service in services.values()):  # noqa: ASYNC110 -- sets no event
                await asyncio.sleep(0.1)
        rng = random.Random(1)  # noqa: S311 -- prompts
        taken: dict[str, list[Figures]] = {way: [] for way in options.ways}
        for turn in range(options.runs + 1):
            for way in rng.sample(options.ways, len(options.ways)):
                service = services[way]
                quiet = await crowd(service, options, rng, holds, 0.0)
                before = await settled(service)
                crowded = await crowd(service, options, rng, options.requests, options.leave)
                after = await settled(service)
                did = [after[name] - before[name] for name in ("swaps", "preemptions")]
                if turn:
                    taken[way].append(Figures(quiet, crowded, *did))
    return taken


def ways_of(text: str) -> list[str]:
    """The settings that ``text`` names, between commas."""
    ways = text.split(",")
    if unknown := [way for way in ways if way not in PREEMPTIONS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(PREEMPTIONS)}")
    return ways


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face model directory")
    parser.add_argument("--prompt", type=int, default=96, help="prompt tokens of each request")
    parser.add_argument("--output", type=int, default=64, help="output tokens of each request")
    parser.add_argument("--requests", type=int, default=40, help="that are made, twice in each turn")
    parser.add_argument("--crowd", type=int, default=10, help="how many times what the pool holds come at once")
    parser.add_argument("--leave", type=float, default=0.3, help="share of the clients of a crowd that leave")
    parser.add_argument("--ways", type=ways_of, default=[*PREEMPTIONS], help="settings compared")
    parser.add_argument("--swap-bytes", type=int, default=256 << 20)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    taken = asyncio.run(measure(options))
    print(
        f"{options.requests} requests of {options.prompt} + {options.output} tokens, medians of {options.runs} turns\n"
    )
    print("| way | one pool full, tokens/s | crowd, tokens/s | ratio | swaps | given back |\n" + "|---" * 6 + "|")
    for way, runs in taken.items():
        ratio = statistics.median(run.crowded / run.quiet for run in runs)
        figures = [statistics.median(getattr(run, name) for run in runs) for name in ("quiet", "crowded")]
        counts = [statistics.median(getattr(run, name) for run in runs) for name in ("swaps", "preemptions")]
        print(f"| {way} | {figures[0]:.0f} | {figures[1]:.0f} | {ratio:.2f} | {counts[0]:.0f} | {counts[1]:.0f} |")


if __name__ == "__main__":
    main()
