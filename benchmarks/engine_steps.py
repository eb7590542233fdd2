"""Times of forward steps against their floor, and against transformers' on the same weights, in turn.

Decode steps by batch and context, prompts by length. The floor of a decode is the bytes that it must read (weights
once, the context's KV once) over the read bandwidth measured in the same run; that of a prompt is its products over the
rate of one large product. All times are medians; what runs beside us hits all of them alike.
Usage: ``python benchmarks/engine_steps.py --model DIRECTORY`` (``kvferry model path smollm2-135m`` names one).
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
from transformers import AutoModelForCausalLM, DynamicCache

from engine.batch import Chunk
from engine.config import EngineConfig
from engine.runner import ModelRunner
from protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
BATCHES = (1, 8, 32)
CONTEXTS = (128, 1024, 4096)
PROMPTS = (128, 512, 4096)
CHUNK = 512
MIB = 1 << 20


def clock(now: Callable[[], float], call: Callable[[], object]) -> float:
    """Seconds of one call by ``now``."""
    began = now()
    call()
    return now() - began


def medians(now: Callable[[], float], calls: Sequence[Callable[[], object]], runs: int) -> list[float]:
    """Median seconds of each of ``calls``, one after the other ``runs`` times; the first round is not counted."""
    rounds = [[clock(now, call) for call in calls] for _ in range(runs + 1)][1:]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


class Floors:
    """What this machine can do right now, by one thread count."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._memory = torch.ones(64 * MIB, dtype=torch.int32)
        self._square = torch.randn(1024, 1024).to(dtype)

    def read(self) -> object:
        """Read 256 MiB once."""
        return self._memory.sum(dtype=torch.int32)

    def multiply(self) -> object:
        """A product of 2.1 GFLOP."""
        return self._square @ self._square

    @property
    def bytes(self) -> int:
        """Read by :meth:`read`."""
        return self._memory.nbytes

    @property
    def flops(self) -> int:
        """Of :meth:`multiply`."""
        return int(2 * self._square.shape[0] ** 3)


class Ours:
    """The engine."""

    def __init__(self, model: Path, threads: int, num_blocks: int) -> None:
        self.runner = ModelRunner.load(EngineConfig(model=str(model), threads=threads, num_blocks=num_blocks))

    def tables(self, batch: int, tokens: int) -> list[list[int]]:
        """Block tables of ``batch`` sequences, one beside the other."""
        width = self.runner.layout.blocks_for(tokens)
        return [list(range(1 + row * width, 1 + (row + 1) * width)) for row in range(batch)]

    def decode(self, batch: int, context: int) -> Callable[[], object]:
        """One step of ``batch`` sequences with ``context`` tokens each."""
        chunks = [Chunk([5], context - 1, table, GREEDY) for table in self.tables(batch, context)]
        return lambda: self.runner.execute(chunks)

    def prompt(self, tokens: int) -> Callable[[], object]:
        """A whole prompt, by chunks."""
        table = self.tables(1, tokens)[0]
        starts = range(0, tokens, CHUNK)
        chunks = [
            Chunk([5] * min(CHUNK, tokens - start), start, table, GREEDY if start + CHUNK >= tokens else None)
            for start in starts
        ]
        return lambda: [self.runner.execute([chunk]) for chunk in chunks]


class Theirs:
    """transformers, with its own cache."""

    def __init__(self, model: Path, dtype: torch.dtype) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()

    @torch.inference_mode()
    def decode(self, batch: int, context: int) -> Callable[[], object]:
        """One step of ``batch`` sequences with ``context`` tokens each."""
        config = self._model.config
        cache = DynamicCache(config=config)
        shape = (batch, config.num_key_value_heads, context - 1, config.head_dim)
        for layer in range(config.num_hidden_layers):
            keys, values = (torch.zeros(shape, dtype=self._model.dtype) for _ in range(2))
            cache.update(keys, values, layer)
        token = torch.full((batch, 1), 5)

        @torch.inference_mode()
        def step() -> object:
            logits = self._model(token, past_key_values=cache, use_cache=True).logits
            cache.crop(-1)
            return logits[:, -1].argmax(-1)

        return step

    def prompt(self, tokens: int) -> Callable[[], object]:
        """A whole prompt at once."""
        ids = torch.full((1, tokens), 5)

        @torch.inference_mode()
        def step() -> object:
            return self._model(ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)

        return step


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face model directory")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--largest", type=int, default=1 << 16, help="skip decodes of more tokens of context in all")
    parser.add_argument("--cpu-time", action="store_true", help="of the one thread, where others share its core")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    if options.cpu_time and options.threads > 1:
        parser.error("--cpu-time counts one thread only")
    now = time.thread_time if options.cpu_time else time.perf_counter

    wanted = [(batch, context) for batch in BATCHES for context in CONTEXTS if batch * context <= options.largest]
    blocks = max(max(batch * -(-context // 16) for batch, context in wanted), max(PROMPTS) // 16) + 1
    ours = Ours(options.model, options.threads, blocks)
    runner = ours.runner
    dtype = runner.cache.tensor.dtype
    theirs, floors = Theirs(options.model, dtype), Floors(dtype)
    per_token = runner.layout.block_bytes // runner.layout.block_size
    config = runner.model_config
    per_layer = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.kv_heads)
    per_layer += 3 * config.hidden_size * config.intermediate_size
    head = config.vocab_size * config.hidden_size
    weights = per_layer * config.num_layers

    rows = []
    clock_name = "CPU time" if options.cpu_time else "time"
    print(f"{options.threads} thread(s), {runner.layout.dtype}, {clock_name}, medians of {options.runs} in turn\n")
    print("| step | ms | floor ms | fraction | transformers ms | ratio |\n|---|---|---|---|---|---|")

    def line(name: str, ours: float, floor: float, theirs: float) -> None:
        rows.append({"step": name, "ours_s": ours, "floor_s": floor, "transformers_s": theirs})
        ratio = theirs / ours
        print(
            f"| {name} | {ours * 1e3:.1f} | {floor * 1e3:.1f} | {floor / ours:.2f} | {theirs * 1e3:.1f} | {ratio:.2f} |"
        )

    for batch, context in wanted:
        calls = (ours.decode(batch, context), theirs.decode(batch, context), floors.read)
        mine, other, read = medians(now, calls, options.runs)
        moved = (weights + head) * dtype.itemsize + batch * context * per_token
        line(f"decode {batch} x {context}", mine, moved / floors.bytes * read, other)
    for tokens in PROMPTS:
        calls = (ours.prompt(tokens), theirs.prompt(tokens), floors.multiply)
        mine, other, product = medians(now, calls, options.runs)
        attention = config.num_layers * 2 * tokens * tokens * config.num_heads * config.head_dim
        work = 2 * weights * tokens + 2 * head + attention
        line(f"prompt {tokens}", mine, work / floors.flops * product, other)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
