"""What it costs to make blocks of another form, against a plain copy of the same blocks, in turn, by CPU time.

One thread, SmolLM2-135M's geometry, 64 blocks of 16 tokens in bfloat16 (22.5 MiB). Pieces are as long as staging makes
them. Rates are bytes of the source pool; medians, so what runs beside us hits all alike.
Usage: ``python benchmarks/repack.py``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from engine.kv_cache import TORCH_DTYPES
from engine.repack import pack, unpack
from kv_transfer.conversion import convert
from kv_transfer.staging import PIECE_BYTES
from protocol.layout import KVLayout
from protocol.wire_layout import WireLayout

BLOCKS = 64
SOURCE = KVLayout(num_layers=30, kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")


def like(**changes: object) -> KVLayout:
    """The source's layout, changed."""
    return KVLayout(**{name: getattr(SOURCE, name) for name in SOURCE.__struct_fields__} | changes)


CASES = {
    "HND": WireLayout(like(order="HND")),
    "32 tokens": WireLayout(like(block_size=32)),
    "8 tokens": WireLayout(like(block_size=8)),
    "32 tokens, HND": WireLayout(like(block_size=32, order="HND")),
    "float32": WireLayout(like(dtype="float32")),
    "fp8 wire": WireLayout(SOURCE, "float8_e4m3"),
}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's memory."""
    return tensor.view(torch.uint8).view(-1).numpy().data


class Case:
    """One form, and memory for it."""

    def __init__(self, pool: torch.Tensor, wire: WireLayout) -> None:
        self._pool = bytes_of(pool)
        self._wire = wire
        self.count = wire.layout.blocks_for(BLOCKS * SOURCE.block_size)
        self._made = torch.zeros(self.count * wire.block_bytes, dtype=torch.uint8)
        self._target = torch.zeros(wire.layout.pool_shape(self.count), dtype=TORCH_DTYPES[wire.layout.dtype])

    def pack(self) -> None:
        """Make all blocks, piece by piece, plans included."""
        wire, size = self._wire, self._wire.layout.block_size
        step = PIECE_BYTES // wire.block_bytes
        for first in range(0, self.count, step):
            count = min(step, self.count - first)
            tokens = range(first * size, (first + count) * size)
            blocks = range(tokens.start // SOURCE.block_size, SOURCE.blocks_for(tokens.stop))
            found = convert(SOURCE, blocks, wire, range(count), tokens)
            piece = bytes_of(self._made)[first * wire.block_bytes : (first + count) * wire.block_bytes]
            pack(self._pool, SOURCE, found.moves, piece, wire, found.incomplete)

    def unpack(self) -> None:
        """Make the pool's blocks out of them."""
        unpack(bytes_of(self._made), self._wire, range(self.count), bytes_of(self._target))


def main() -> None:
    """Print one line per form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    runs = parser.parse_args().runs
    torch.set_num_threads(1)
    pool = torch.randn(SOURCE.pool_shape(BLOCKS)).to(torch.bfloat16)
    copied = np.zeros(pool.nbytes, np.uint8)
    calls: dict[str, Callable[[], object]] = {"copy": lambda: np.copyto(copied, bytes_of(pool))}
    for name, wire in CASES.items():
        case = Case(pool, wire)
        calls[name] = case.pack
        if not wire.as_in_pool:
            calls[f"{name}, back"] = case.unpack
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(runs + 1):
        for name, call in calls.items():
            began = time.thread_time()
            call()
            times[name].append(time.thread_time() - began)
    median = {name: statistics.median(found[1:]) for name, found in times.items()}
    for name, seconds in median.items():
        print(f"{name:18} {pool.nbytes / seconds / 1e9:6.2f} GB/s  {median['copy'] / seconds:5.2f} of a copy")


if __name__ == "__main__":
    main()
