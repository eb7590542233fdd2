"""Whole steps of decodes on one device, captured as CUDA graphs and launched kernel by kernel in turn; medians.

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

import torch

from engine.batch import Chunk
from engine.config import EngineConfig
from engine.runner import ModelRunner
from protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
BLOCK = 16
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


def steps(clock: Clock, device: torch.device, model: Path, *, small: bool) -> list[dict[str, Any]]:
    """The rows of the table."""
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
    """One line of the table; ``ratio`` is how much faster than launched."""
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
    found = steps(clock, device, options.model, small=options.small)
    options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
