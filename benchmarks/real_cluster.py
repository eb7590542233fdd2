"""Two prefill and two decode workers on this machine: whether policies, and the break-even, hold what simulation says.

    python benchmarks/real_cluster.py policies --model DIRECTORY [--rate 1.2] [--requests 40] [--rounds 3]
    python benchmarks/real_cluster.py break-even --model DIRECTORY [--prompts 32,128,384] [--outputs 8,32] [--rounds 3]

Each worker is a process of its own with one thread; for each policy, or way, there is a router, all before the same
workers. They take turns, in an order that is drawn, so what else the machine does hits all of them. Every turn plays
the same trace with prompts that no cache has seen. ``kvferry model path smollm2-135m`` names a model.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster.bench.serve.drive import drive
from cluster.bench.serve.pacer import ClosedLoop, OpenLoop, Order, Pacer
from cluster.bench.serve.prompt import PromptMaker
from cluster.bench.traces.registry import make_trace
from cluster.bench.traces.request import TraceRequest
from cluster.bench.worker_process import MODEL, worker_process
from protocol.sampling import SamplingParams
from router.config import RouterConfig
from router.front.generation import Generation
from router.service import Service

TOKEN_IDS = (100, 31_999)
READY_IN = 300.0
EQUAL = 0.05
"""Share by which two ways may differ and still be equal: choosing either is right then."""
WAYS = ("never", "always", "auto")


@dataclass
class Taken:
    """What one router's requests took, in seconds: to the first token, per further one, and in all."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    local: int = 0

    def add(self, other: Taken) -> None:
        """Those of a further turn."""
        self.ttft += other.ttft
        self.tpot += other.tpot
        self.e2e += other.e2e
        self.local += other.local


@asynccontextmanager
async def cluster(options: argparse.Namespace, routers: dict[str, RouterConfig]) -> AsyncIterator[dict[str, Service]]:
    """Bring up a router of each kind, and the workers behind all of them."""
    engine: dict[str, Any] = {
        "model": str(options.model),
        "threads": 1,
        "block_size": 16,
        "num_blocks": options.blocks,
        "max_batch_tokens": 256,
        "max_sequences": 16,
        "max_model_len": options.max_tokens,
    }
    async with AsyncExitStack() as stack:
        services = {}
        for name, config in routers.items():
            services[name] = service = Service(config)
            await service.start()
            stack.push_async_callback(service.close)
        hubs = [service.hub_endpoint for service in services.values()]
        for role in ("prefill", "decode"):
            for number in range(2):
                order = {"role": role, "name": f"{role}-{number}", "engine": engine, "routers": hubs}
                await stack.enter_async_context(worker_process(order))
        async with asyncio.timeout(READY_IN):
            for service in services.values():
                while sum(worker["state"] == "live" for worker in service.cluster()["workers"]) < 4:  # noqa: ASYNC110 -- sets no event
                    await asyncio.sleep(0.1)
        yield services


async def play(service: Service, requests: Iterable[TraceRequest], salt: str, at_once: int = 0) -> Taken:
    """Play a trace, by its own times or so many requests at once."""
    prompts, taken, start = PromptMaker(salt, TOKEN_IDS), Taken(), time.perf_counter()

    async def ask(order: Order) -> None:
        request = order.request
        sampling = SamplingParams(temperature=0.0, max_tokens=request.output_tokens)
        wanted = Generation(tuple(prompts.tokens(request)), sampling, session=f"{salt}-{request.session}")
        first, report = 0.0, None
        async for part in service.generate(wanted):
            first = first or time.perf_counter()
            report = part.report or report
        end = time.perf_counter()
        taken.ttft.append(first - order.due)
        taken.e2e.append(end - order.due)
        if request.output_tokens > 1:
            taken.tpot.append((end - first) / (request.output_tokens - 1))
        taken.local += bool(report is not None and report.local_prefill)

    pacer: Pacer = ClosedLoop(requests, concurrency=at_once) if at_once else OpenLoop(requests, start=start)
    await drive(pacer, ask, time.perf_counter)
    await settled(service)
    return taken


async def settled(service: Service) -> None:
    """Return once no worker has anything to do, so that no turn has to do with the one before."""
    async with asyncio.timeout(READY_IN):
        while any(  # noqa: ASYNC110 -- sets no event
            worker["load"]["running"] + worker["load"]["waiting"] + worker["load"]["pool"]["active"]
            for worker in service.cluster()["workers"]
        ):
            await asyncio.sleep(0.2)


async def policies(options: argparse.Namespace) -> None:
    """Each policy on the same conversations."""
    names = options.policies.split(",")
    config = RouterConfig(model=MODEL, tokenizer=str(options.model), worker_timeout=READY_IN)
    taken: dict[str, Taken] = {name: Taken() for name in names}
    ratios: dict[str, list[float]] = {name: [] for name in names}
    rng = random.Random(0)  # noqa: S311 -- turns
    async with cluster(options, {name: replace(config, policy=name) for name in names}) as services:
        for turn in range(options.rounds + 1):
            trace = make_trace(
                "multi-turn",
                requests=options.requests if turn else 8,
                rate=options.rate,
                seed=turn,
                prompt_tokens=options.prompt,
                output_tokens=options.output,
                max_tokens=options.max_tokens,
            )
            means = {}
            for name in rng.sample(names, len(names)):
                found = await play(services[name], trace, f"{turn}-{name}")
                means[name] = statistics.fmean(found.ttft)
                if turn:
                    taken[name].add(found)
            if turn:
                for name in names:
                    ratios[name].append(means[names[0]] / means[name])
                print("round", turn, {name: round(1e3 * mean) for name, mean in means.items()}, flush=True)
    ttft, tpot = options.ttft, options.tpot
    print(f"\n| policy | mean TTFT ms | p50 | p90 | TPOT ms | in {ttft:g} s, {tpot:g} s | {names[0]} by it, by round |")
    print("|---|---|---|---|---|---|---|")
    for name, found in taken.items():
        good = [first <= ttft and each <= tpot for first, each in zip(found.ttft, found.tpot, strict=True)]
        tenths = statistics.quantiles(found.ttft, n=10)
        print(
            f"| {name} | {1e3 * statistics.fmean(found.ttft):.0f} | {1e3 * tenths[4]:.0f} | {1e3 * tenths[8]:.0f} "
            f"| {1e3 * statistics.fmean(found.tpot):.0f} | {100 * statistics.fmean(good):.0f} % "
            f"| {', '.join(f'{ratio:.2f}' for ratio in ratios[name])} |"
        )


async def break_even(options: argparse.Namespace) -> None:
    """Each cell with all prompts on prefill workers, all on decode workers, and where the router says."""
    config = RouterConfig(model=MODEL, tokenizer=str(options.model), worker_timeout=READY_IN)
    cells = [
        (prompt, output, at_once)
        for prompt in map(int, options.prompts.split(","))
        for output in map(int, options.outputs.split(","))
        for at_once in map(int, options.at_once.split(","))
    ]
    taken = {(cell, way): Taken() for cell in cells for way in WAYS}
    rng = random.Random(0)  # noqa: S311 -- turns
    async with cluster(options, {way: replace(config, local_prefill=way) for way in WAYS}) as services:
        for turn in range(options.rounds + 1):
            for number, (prompt, output, at_once) in enumerate(cells):
                trace = make_trace(
                    "poisson",
                    requests=options.requests if turn else 2,
                    rate=1.0,
                    prompt_tokens=prompt,
                    output_tokens=output,
                )
                for way in rng.sample(WAYS, len(WAYS)):
                    found = await play(services[way], trace, f"{turn}-{number}-{way}", at_once)
                    if turn:
                        taken[cells[number], way].add(found)
    right = 0
    print("| prompt | output | at once | apart ms | on decode ms | auto ms | on decode | against the better | right |")
    print("|---|---|---|---|---|---|---|---|---|")
    for cell in cells:
        # Medians: one hiccup of a shared machine is as long as many requests.
        apart, alone, auto = (statistics.median(taken[cell, way].e2e) for way in WAYS)
        share = taken[cell, "auto"].local / len(taken[cell, "auto"].e2e)
        better = min(apart, alone)
        equal = abs(apart - alone) <= EQUAL * better
        good = equal or (share >= 0.5) == (alone < apart) or auto <= (1.0 + EQUAL) * better
        right += good
        word = "equal" if equal else "yes" if good else "no"
        print(
            f"| {' | '.join(map(str, cell))} | {1e3 * apart:.0f} | {1e3 * alone:.0f} | {1e3 * auto:.0f} "
            f"| {100 * share:.0f} % | {100 * (auto / better - 1):+.0f} % | {word} |"
        )
    print(f"\n{right} of {len(cells)} cells")


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    first = kinds.add_parser("policies")
    first.set_defaults(run=policies)
    first.add_argument("--policies", default="cost,prefix_aware,session_affinity,least_loaded,round_robin")
    first.add_argument("--rate", type=float, default=1.2, help="requests a second")
    first.add_argument("--requests", type=int, default=40, help="of a turn")
    first.add_argument("--prompt", type=int, default=128)
    first.add_argument("--output", type=int, default=16)
    first.add_argument("--ttft", type=float, default=1.0)
    first.add_argument("--tpot", type=float, default=0.2)
    second = kinds.add_parser("break-even")
    second.set_defaults(run=break_even)
    second.add_argument("--prompts", default="32,128,384")
    second.add_argument("--outputs", default="8,32")
    second.add_argument("--at-once", default="1,4")
    second.add_argument("--requests", type=int, default=8, help="of a cell in a turn")
    for each in (first, second):
        each.add_argument("--model", type=Path, required=True, help="a Hugging Face model directory")
        each.add_argument("--rounds", type=int, default=3)
        each.add_argument("--blocks", type=int, default=512, help="of each pool")
        each.add_argument("--max-tokens", type=int, default=1024, help="of a prompt and its answer")
    options = parser.parse_args()
    asyncio.run(options.run(options))


if __name__ == "__main__":
    main()
