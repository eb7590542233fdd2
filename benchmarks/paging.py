"""What paging costs attention: blocks of 16 tokens, scattered, against each sequence's KV in one piece, in turn.

The heads are the shipped model's, the kernels the engine's own, the pool one of four layers. In one piece means a block
that is as long as the context. Ratios are within a round, medians over the rounds.
Usage: ``python benchmarks/paging.py``.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from engine.attention import create_backend
from engine.attention.backend import Scoring
from engine.batch import BatchLimits, Chunk, flatten
from engine.kv_cache import KVCache
from protocol.layout import KVLayout

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 9, 3, 64, 4
BLOCK = 16
CPU = torch.device("cpu")


class Case(NamedTuple):
    """A step of sequences alike."""

    batch: int
    context: int
    queries: int

    def __str__(self) -> str:
        kind = "decode" if self.queries == 1 else f"{self.queries} of a prompt"
        return f"{kind}, {self.batch} x {self.context}"


CASES = (Case(32, 128, 1), Case(8, 1024, 1), Case(8, 4096, 1), Case(1, 4096, 512))


def attention(case: Case, block_size: int, seed: int) -> Callable[[], None]:
    """Attention of one step, through all layers."""
    width = -(-case.context // block_size)
    layout = KVLayout(num_layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=block_size, dtype="bfloat16")
    cache = KVCache(layout, 1 + case.batch * width)
    cache.tensor.fill_(0.25)
    blocks = list(range(1, cache.num_blocks))
    random.Random(seed).shuffle(blocks)  # noqa: S311
    chunks = [
        Chunk([0] * case.queries, case.context - case.queries, blocks[row * width : (row + 1) * width])
        for row in range(case.batch)
    ]
    limits = BatchLimits(block_size=block_size, num_blocks=cache.num_blocks, vocab_size=1, max_model_len=case.context)
    plan = create_backend("auto", layout, CPU).plan(flatten(chunks, limits))
    q = torch.randn(case.batch * case.queries, HEADS, HEAD_DIM).bfloat16()
    scoring = Scoring(HEAD_DIM**-0.5)

    def step() -> None:
        for layer in range(LAYERS):
            plan.forward(q, *cache.layer(layer), scoring)

    return step


def compare(case: Case, runs: int, now: Callable[[], float]) -> tuple[float, float, float]:
    """Median seconds of a layer in blocks and in one piece, and the median ratio."""
    ways = [attention(case, size, seed=1) for size in (BLOCK, case.context)]
    rounds: list[list[float]] = []
    for _ in range(runs + 1):
        times = []
        for way in ways:
            began = now()
            way()
            times.append((now() - began) / LAYERS)
        rounds.append(times)
    paged, whole = (statistics.median(times) for times in zip(*rounds[1:], strict=True))
    return paged, whole, statistics.median(first / second for first, second in rounds[1:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="of the one thread, where others share its core")
    options = parser.parse_args(arguments)
    if options.cpu_time and options.threads > 1:
        parser.error("--cpu-time counts one thread only")
    torch.set_num_threads(options.threads)
    now = time.thread_time if options.cpu_time else time.perf_counter
    print("| attention of a layer | in blocks ms | in one piece ms | ratio |\n|---|---|---|---|")
    with torch.inference_mode():
        for case in CASES:
            paged, whole, ratio = compare(case, options.runs, now)
            print(f"| {case} | {paged * 1e3:.3f} | {whole * 1e3:.3f} | {ratio:.3f} |", flush=True)


if __name__ == "__main__":
    main()
