"""GB/s of the shm transport against one memory copy in one process, two processes on one host.

``np.copyto`` of one run, between two pools of the same kinds, is what one copy costs at the least; both move the same
number of bytes turn about, so that what else runs on the machine hits both alike. Times are medians, from the call to
the acknowledgement. Usage: ``python benchmarks/shared_memory.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import time

import numpy as np

from engine.shared_memory import allocate
from kv_transfer.plan import plan
from kv_transfer.transport import Window, make_receiver, make_sender
from protocol.layout import KVLayout

KIB = 1 << 10
SIZES = (64 * KIB, 1024 * KIB, 8192 * KIB, 65536 * KIB)
LAYOUT = KVLayout(num_layers=8, kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16")
"""64 KiB a block of 16 tokens."""
POOL_BLOCKS = 2 * max(SIZES) // LAYOUT.block_bytes
SCATTERED = "scattered"


def chosen(size: int, seed: int, shape: str) -> list[int]:
    """Blocks of one transfer: one run of them, or spread over the pool."""
    count, rng = size // LAYOUT.block_bytes, random.Random(seed)  # noqa: S311
    if shape == SCATTERED:
        return rng.sample(range(POOL_BLOCKS), count)
    first = rng.randrange(POOL_BLOCKS - count + 1)
    return list(range(first, first + count))


async def receive() -> None:
    """The receiving process: opens a window for each line on its input, until the input ends."""
    pool, descriptor = allocate(LAYOUT.pool_bytes(POOL_BLOCKS))
    np.frombuffer(pool, np.uint8)[:] = 1
    receiver = make_receiver("shm://*", memoryview(pool))
    print(receiver.address, flush=True)
    loop = asyncio.get_running_loop()
    landed = asyncio.Event()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        ticket, blocks = json.loads(line)
        landed.clear()
        window = Window(bytes.fromhex(ticket), tuple(blocks), (1,) * len(blocks), LAYOUT.block_bytes)
        receiver.open(window, lambda _: landed.set(), lambda *_: None)
        print(flush=True)
        await landed.wait()
        await receiver.close_window(window.ticket)
    await receiver.close()
    os.close(descriptor)


async def measure(peer: subprocess.Popen[str], seconds: float) -> None:
    """Interleave both ways over all sizes and print a table."""
    assert peer.stdin is not None
    assert peer.stdout is not None
    address = peer.stdout.readline().strip()
    memory, descriptor = allocate(LAYOUT.pool_bytes(POOL_BLOCKS))
    source = np.frombuffer(memory, np.uint8)
    source[:] = 2
    target = np.frombuffer(allocate(source.nbytes)[0], np.uint8)
    target[:] = 3
    sender = make_sender("shm", memoryview(memory), descriptor=descriptor)
    print(f"{'KiB':>8} {'blocks':>11} {'rounds':>7} {'p50 us':>8} {'shm GB/s':>9} {'copy GB/s':>10} {'ratio':>6}")
    cases = [(size, shape) for shape in ("one run", SCATTERED) for size in SIZES]
    for size, shape in cases:
        ours: list[float] = []
        theirs: list[float] = []
        until = time.monotonic() + seconds / len(cases)
        while time.monotonic() < until or len(ours) < 9:
            here, there = chosen(size, 2 * len(ours), shape), chosen(size, 2 * len(ours) + 1, shape)
            spans = plan(LAYOUT, here, LAYOUT, there)
            named = [(block, 1) for block in there]
            ticket = secrets.token_bytes(16)
            peer.stdin.write(json.dumps([ticket.hex(), there]) + "\n")
            peer.stdin.flush()
            peer.stdout.readline()
            started = time.perf_counter()
            await sender.ship(address, ticket, spans, named)
            ours.append(time.perf_counter() - started)
            first, last = chosen(size, 2 * len(ours), "one run")[0], chosen(size, 2 * len(ours) + 1, "one run")[0]
            run, into = first * LAYOUT.block_bytes, last * LAYOUT.block_bytes
            started = time.perf_counter()
            np.copyto(target[into : into + size], source[run : run + size])
            theirs.append(time.perf_counter() - started)
        mine, other = statistics.median(ours[1:]), statistics.median(theirs[1:])
        figures = f"{mine * 1e6:8.0f} {size / mine / 1e9:9.2f} {size / other / 1e9:10.2f} {other / mine:6.2f}"
        print(f"{size // KIB:8d} {shape:>11} {len(ours):7d} {figures}", flush=True)
    await sender.close()
    os.close(descriptor)


def main() -> None:
    """Start the receiving process and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive:
        asyncio.run(receive())
        return
    command = [sys.executable, __file__, "--receive"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:  # noqa: S603
        asyncio.run(measure(peer, arguments.seconds))


if __name__ == "__main__":
    main()
