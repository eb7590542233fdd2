"""What a checksum costs each transport: the same ships with and without one, in turn, between two processes.

Scattered blocks of 64 KiB. Two receiving processes stand side by side, so that neither pays for the other's connection;
each round ships once to either. The ratio is the median over the rounds of seconds without over seconds with.
Usage: ``python benchmarks/checksum_cost.py [--rounds 41] [--transports shm,tcp,ucx]``.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from contextlib import AsyncExitStack

from cluster.bench import near_end
from cluster.bench.block_table import transfers
from cluster.bench.case import Case
from cluster.bench.local_peer import local_peer
from cluster.bench.near_end import Session, Setup
from kv_transfer.transport import TransportConfig
from protocol.layout import KVLayout

LAYOUT = KVLayout(num_layers=1, kv_heads=16, head_dim=64, block_size=16)
BLOCKS = (1, 16, 128, 1024)
SEED = 1


async def opened(stack: AsyncExitStack, scheme: str, *, checksum: bool) -> Session:
    """A session with a receiving process of its own."""
    blocks = 2 * max(BLOCKS)
    where = await stack.enter_async_context(local_peer(LAYOUT.pool_bytes(blocks)))
    setup = Setup(LAYOUT, blocks, TransportConfig(checksum=checksum), SEED)
    return await stack.enter_async_context(near_end.opened(*where, scheme, setup))


async def measure(scheme: str, rounds: int) -> None:
    """Print a line for each size."""
    async with AsyncExitStack() as stack:
        plain, summed = [await opened(stack, scheme, checksum=checksum) for checksum in (False, True)]
        for blocks in BLOCKS:
            tokens = blocks * LAYOUT.block_size
            case = Case(transport=scheme, tokens=tokens, table="scattered", way="whole", concurrency=1)
            moved = transfers(case, LAYOUT, 2 * max(BLOCKS), seed=SEED)
            for session in (plain, summed):
                await session.ship_round(moved, checked=True)
            times = [
                ((await plain.ship_round(moved)).wall, (await summed.ship_round(moved)).wall) for _ in range(rounds)
            ]
            without, with_ = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
            ratio = statistics.median(before / after for before, after in times)
            kib = blocks * LAYOUT.block_bytes >> 10
            print(f"{scheme:4} {kib:6} KiB  {without:8.2f} ms without  {with_:8.2f} ms with  {ratio:5.2f}", flush=True)


async def main() -> None:
    """Read the arguments and measure one transport after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--transports", default="shm,tcp,ucx")
    arguments = parser.parse_args()
    for scheme in arguments.transports.split(","):
        await measure(scheme, arguments.rounds)


if __name__ == "__main__":
    asyncio.run(main())
