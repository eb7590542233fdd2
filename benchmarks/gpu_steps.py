"""Attention on paged KV, and whole steps of decodes with and without CUDA graphs, on one device.

Attention is that of one layer of a model like Llama 3 8B (32 heads, 8 of K and V, of 128 elements, bfloat16): decodes
are held against the bandwidth that a plain copy on the device reaches in the same run, prompts against one large
product. Steps are the model's own, captured and launched kernel by kernel in turn. All times are medians.
Usage: ``python benchmarks/gpu_steps.py --model DIRECTORY --json FILE``; ``--device cpu --small`` tries the script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.attention import create_backend
from engine.attention.backend import Scoring
from engine.batch import BatchLimits, Chunk, flatten
from engine.config import EngineConfig
from engine.kv_cache import KVCache
from engine.runner import ModelRunner
from protocol.layout import KVLayout
from protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16
DECODES = ((1, 8192), (16, 2048), (64, 2048), (64, 8192))
PROMPTS = ((512, 0), (512, 4096), (2048, 0))
BATCHES = (1, 8, 32, 64)
CONTEXT = 1024
REPEATS = 20
"""Calls of one timing, after which the device is waited for once."""


class Clock:
    """Medians of calls that take turns, on one device."""

    def __init__(self, device: torch.device, runs: int, repeats: int) -> None:
        self._device = device
        self._runs = runs
        self._repeats = repeats

    def medians(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """Seconds of one of each; the first round is not counted."""
        rounds = [[self._seconds(call) for call in calls] for _ in range(self._runs + 1)][1:]
        return [statistics.median(times) for times in zip(*rounds, strict=True)]

    def _seconds(self, call: Callable[[], object]) -> float:
        self._wait()
        began = time.perf_counter()
        for _ in range(self._repeats):
            call()
        self._wait()
        return (time.perf_counter() - began) / self._repeats

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Layer:
    """One layer's attention over scattered blocks."""

    def __init__(self, device: torch.device, tokens: int) -> None:
        layout = KVLayout(num_layers=1, kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK, dtype="bfloat16")
        self._blocks = 1 + tokens // BLOCK
        self._cache = KVCache(layout, self._blocks, device)
        self._backend = create_backend("auto", layout, device)
        self._device = device
        self.name = type(self._backend).__name__

    def attend(self, rows: int, count: int, start: int) -> Callable[[], object]:
        """Attention of ``rows`` sequences with ``count`` tokens each after ``start`` others."""
        ids = iter((1 + np.random.default_rng(0).permutation(self._blocks - 1)).tolist())
        needed = -(-(start + count) // BLOCK)
        chunks = [Chunk([0] * count, start, [next(ids) for _ in range(needed)], GREEDY) for _ in range(rows)]
        plan = self._backend.plan(flatten(chunks, BatchLimits(BLOCK, self._blocks, 1, 1 << 20)))
        q = torch.randn(rows * count, HEADS, HEAD_DIM, device=self._device).to(torch.bfloat16)
        scoring = Scoring(HEAD_DIM**-0.5)
        return lambda: plan.forward(q, *self._cache.layer(0), scoring)


def attention(clock: Clock, device: torch.device, *, small: bool) -> list[dict[str, Any]]:
    """The rows of attention."""
    decodes = ((2, 256),) if small else DECODES
    prompts = ((64, 64),) if small else PROMPTS
    layer = Layer(device, max([rows * context for rows, context in decodes] + [sum(prompt) for prompt in prompts]))
    source = torch.ones((1 << 20) if small else (1 << 30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    side = 256 if small else 4096
    square = torch.randn(side, side, device=device).to(torch.bfloat16)
    found = []
    for rows, context in decodes:
        ours, copied = clock.medians([layer.attend(rows, 1, context - 1), lambda: target.copy_(source)])
        read = 2 * rows * context * KV_HEADS * HEAD_DIM * 2 / ours
        # A copy reads and writes.
        limit = 2 * source.nbytes / copied
        found.append(row(layer.name, f"decode {rows} x {context}", ours, read / 1e9, "GB/s", read / limit))
    for count, start in prompts:
        ours, product = clock.medians([layer.attend(1, count, start), lambda: square @ square])
        done = 4 * HEADS * HEAD_DIM * (count * start + count * (count + 1) / 2) / ours
        limit = 2 * side**3 / product
        found.append(row(layer.name, f"prompt {count} after {start}", ours, done / 1e12, "TFLOP/s", done / limit))
    return found


def steps(clock: Clock, device: torch.device, model: Path, *, small: bool) -> list[dict[str, Any]]:
    """The rows of whole steps."""
    batches = (1, 2) if small else BATCHES
    context = 64 if small else CONTEXT
    width = -(-context // BLOCK)
    runner = ModelRunner.load(
        EngineConfig(
            model=str(model),
            device=str(device),
            num_blocks=1 + max(batches) * width,
            max_model_len=context,
            max_sequences=max(batches),
        )
    )
    runner.warm_up()
    graphs, found = runner._graphs, []
    for rows in batches:
        tables = [list(range(1 + index * width, 1 + (index + 1) * width)) for index in range(rows)]
        chunks = [Chunk([5], context - 1, table, GREEDY) for table in tables]

        def step(captured: object, chunks: list[Chunk] = chunks) -> object:
            runner._graphs = captured  # type: ignore[assignment]
            return runner.execute(chunks)

        captured, launched = clock.medians([lambda step=step: step(graphs), lambda step=step: step(None)])
        name = f"step {rows} x {context}"
        found.append(row("launched", name, launched, rows / launched, "tokens/s", None))
        if graphs is not None and graphs.captured:
            found.append(row("captured", name, captured, rows / captured, "tokens/s", launched / captured))
    return found


def row(by: str, case: str, seconds: float, rate: float, unit: str, ratio: float | None) -> dict[str, Any]:
    """One line of the table; ``ratio`` is of the limit, or how much faster."""
    return {"by": by, "case": case, "ms": 1e3 * seconds, "rate": rate, "unit": unit, "ratio": ratio}


def main() -> None:
    """Write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face model directory")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a moment's work, for a CPU")
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    options = parser.parse_args()
    device = torch.device(options.device)
    clock = Clock(device, options.runs, 1 if options.small else REPEATS)
    with torch.inference_mode():
        found = attention(clock, device, small=options.small)
    found += steps(clock, device, options.model, small=options.small)
    options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
