"""A GPU's memory through UCX's own CUDA module, over the stand-in for the driver; run by test_ucx_device.

Its argument is the stand-in. UCX then takes host memory for a GPU's, and moves it by copies that the driver makes.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import secrets
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from kv_transfer.memory import DeviceMemory
from kv_transfer.span import Span
from kv_transfer.transport import Landed, TransportConfig, Window, make_receiver, make_sender
from kv_transfer.ucx import gpudirect

CUDA = ctypes.CDLL(sys.argv[1])
CUDA.stand_in_device.argtypes = [ctypes.c_uint64, ctypes.c_size_t]
POISON, BLOCKS = 0xA5, 32
CONFIG = TransportConfig(gpudirect="on", timeout=10.0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20.0):
        while not condition():  # noqa: ASYNC110 -- bytes in memory set no event
            await asyncio.sleep(0)


class Ends:
    """A sender and a receiver, whose pools UCX takes for a GPU's."""

    def __init__(self, block_bytes: int) -> None:
        self.size = block_bytes
        memory = np.frombuffer(mmap.mmap(-1, 2 * BLOCKS * block_bytes), np.uint8)
        CUDA.stand_in_device(memory.ctypes.data, memory.nbytes)
        self.source, self.target = memory.reshape(2, BLOCKS, block_bytes)
        self.source[:] = np.random.default_rng(1).integers(0, POISON, self.source.shape, np.uint8)
        self.target[:] = POISON
        self.receiver = make_receiver("ucx://127.0.0.1:0", self._memory(self.target), CONFIG)
        self.sender = make_sender("ucx", self._memory(self.source), CONFIG)
        self.landed: list[Landed] = []

    @staticmethod
    def _memory(pool: Any) -> DeviceMemory:
        return DeviceMemory(pool.ctypes.data, pool.nbytes, 0)

    def open(self, blocks: list[int]) -> bytes:
        window = Window(secrets.token_bytes(16), tuple(blocks), (1,) * len(blocks), self.size)
        self.receiver.open(window, self.landed.append, lambda *_: None)
        return window.ticket

    async def ship(self, ticket: bytes, blocks: list[int]) -> None:
        spans = [Span(block * self.size, block * self.size, self.size) for block in blocks]
        await self.sender.ship(self.receiver.address, ticket, spans, [(block, 1) for block in blocks])

    async def close(self) -> None:
        await self.sender.close()
        await self.receiver.close()


async def moves() -> None:
    """Blocks that UCX sends eagerly, and blocks that it fetches."""
    for block_bytes in (4096, 256 << 10):
        ends = Ends(block_bytes)
        for count, blocks in enumerate(([3], [5, 6, 9], list(range(BLOCKS))), 1):
            await ends.ship(ends.open(blocks), blocks)
            await until(lambda count=count, ends=ends: len(ends.landed) == count)
            assert (ends.target[blocks] == ends.source[blocks]).all()
            await ends.receiver.close_window(ends.landed[-1].ticket)
        await ends.close()
    assert ctypes.c_int.in_dll(CUDA, "stand_in_copies").value > 0, "UCX took it for host memory"


def main() -> None:
    """Say what UCX finds, then pretend that RDMA reaches the memory."""
    found = gpudirect.examine(0)
    assert found.knows_cuda, "no CUDA module"
    assert [domain for domain in found.domains if domain.cuda]
    print(found.why_not())
    good = gpudirect.Found("UCX", True, (gpudirect.Domain("ib", "mlx5_0", True, False),), True, False, True)
    gpudirect.examine = lambda device, tls="": good
    asyncio.run(moves())
    print("done")


if __name__ == "__main__":
    main()
