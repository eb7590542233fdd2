"""What shipping the last chunk by layers gains: from its end to commit, and to the first token, by layers per ship.

A router for each setting, a prefill worker for each, and one decode worker that they share; the settings take turns, so
what runs beside us hits all of them alike. All figures are medians, and a ratio is the median of each turn's to the
first setting. The link may be a slower one: give the decode worker a network namespace, and name the addresses at
either end of the way there.
Usage: ``python benchmarks/handoff_layers.py --model DIRECTORY`` (``kvferry model path smollm2-135m`` names one).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.bench.worker_process import MODEL, worker_process
from protocol.sampling import SamplingParams
from router.config import RouterConfig
from router.front.generation import Generation
from router.service import Service

FIRST_ID, LAST_ID = 100, 40_000
OUTPUT = 4
READY_IN = 120.0
TIMES = ("ttft", "prefill", "handoff")
MIB = 1 << 20


@dataclass(frozen=True)
class Figures:
    """One request: seconds to its first token, of prefill, and from the last chunk's end to commit; what crossed."""

    ttft: float
    prefill: float
    handoff: float
    nbytes: int
    transport: str


async def ask(service: Service, tokens: int, rng: random.Random) -> Figures:
    """A prompt that nobody has seen, a few tokens of answer, and what they took."""
    prompt = tuple(rng.randrange(FIRST_ID, LAST_ID) for _ in range(tokens))
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT)
    began, first = time.perf_counter(), 0.0
    async for output in service.generate(Generation(token_ids=prompt, sampling=sampling)):
        first = first or time.perf_counter()
        report = output.report
    assert report is not None
    return Figures(first - began, report.prefill_s, report.handoff_s, report.kv_bytes, report.transport)


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Bring everything up, take the figures in turn, and bring it down."""
    engine = {
        "model": str(options.model),
        "threads": 1,
        "num_blocks": 2 * -(-max(options.tokens) // 16) + 8,
        "max_batch_tokens": options.chunk,
        "prefix_cache": False,
    }
    async with AsyncExitStack() as stack:
        services = {}
        for layers in options.layers:
            hub = f"tcp://{options.host}:0"
            config = RouterConfig(model=MODEL, tokenizer=str(options.model), hub=hub, worker_timeout=READY_IN)
            services[layers] = service = Service(config)
            await service.start()
            stack.push_async_callback(service.close)
            order = {
                "role": "prefill",
                "name": f"prefill-{layers}",
                "engine": engine,
                "routers": [service.hub_endpoint],
                "bind_host": options.host,
                "transport": options.transport,
                "layers_per_ship": layers,
            }
            await stack.enter_async_context(worker_process(order))
        order = {
            "role": "decode",
            "name": "decode",
            "engine": engine,
            "routers": [service.hub_endpoint for service in services.values()],
            "bind_host": options.decode_host or options.host,
            "transport": options.transport,
        }
        await stack.enter_async_context(worker_process(order, shlex.split(options.decode_command)))
        async with asyncio.timeout(READY_IN):
            while not all(service.health().ready for service in services.values()):  # noqa: ASYNC110 -- sets no event
                await asyncio.sleep(0.1)
        rng = random.Random(1)  # noqa: S311 -- prompts
        taken: dict[tuple[int, int], list[Figures]] = {}
        for turn in range(options.runs + 1):
            for tokens in options.tokens:
                for layers in rng.sample(options.layers, len(options.layers)):
                    figures = await ask(services[layers], tokens, rng)
                    if turn:
                        taken.setdefault((tokens, layers), []).append(figures)
    return [
        {
            "tokens": tokens,
            "layers_per_ship": layers,
            "transport": runs[0].transport,
            "kv_bytes": runs[0].nbytes,
            **{name: statistics.median(getattr(each, name) for each in runs) for name in TIMES},
            "ttft_ratio": statistics.median(
                each.ttft / first.ttft for each, first in zip(runs, taken[tokens, options.layers[0]], strict=True)
            ),
        }
        for (tokens, layers), runs in sorted(
            taken.items(), key=lambda item: (item[0][0], options.layers.index(item[0][1]))
        )
    ]


def numbers(text: str) -> list[int]:
    """``"64,512"`` as a list."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face model directory")
    parser.add_argument("--tokens", type=numbers, default=[64, 512, 900, 4096], help="prompt lengths")
    parser.add_argument("--layers", type=numbers, default=[0, 30, 15, 10, 5], help="settings of layers_per_ship")
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens of one step")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--host", default="127.0.0.1", help="address of the routers and the prefill workers")
    parser.add_argument("--decode-host", default="", help="address of the decode worker, where it is another")
    parser.add_argument("--decode-command", default="", help="put before the decode worker: 'ip netns exec far'")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    rows = asyncio.run(measure(options))
    print(f"{options.transport}, chunks of {options.chunk} tokens, medians of {options.runs} in turn\n")
    print("| tokens | KV MiB | layers per ship | TTFT ms | prefill ms | handoff ms | TTFT ratio |\n" + "|---" * 7 + "|")
    for row in rows:
        times = " | ".join(f"{row[name] * 1e3:.2f}" for name in TIMES)
        setting, nbytes = row["layers_per_ship"] or "whole", row["kv_bytes"] / MIB
        print(f"| {row['tokens']} | {nbytes:.2f} | {setting} | {times} | {row['ttft_ratio']:.2f} |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
