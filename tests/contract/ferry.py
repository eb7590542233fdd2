"""Two pools and the ends between them, for the contract tests."""

import asyncio
import os
import secrets
from collections.abc import Callable, Sequence

import numpy as np

from engine.shared_memory import allocate
from kv_transfer.memory import DeviceMemory
from kv_transfer.span import Span
from kv_transfer.transport import (
    ON_DEVICES,
    Landed,
    Receiver,
    Sender,
    ShipReport,
    TransportConfig,
    Window,
    make_receiver,
    make_sender,
)
from protocol.errors import TransferError

POISON = 0xA5
PATIENCE = 120.0
BIND = {
    "inproc": "inproc://*",
    "shm": "shm://*",
    "tcp": "tcp://127.0.0.1:0",
    "ucx": "ucx://127.0.0.1:0",
    "ucxx": "ucxx://127.0.0.1:0",
    "nixl": "nixl://127.0.0.1:0",
    "cuda_ipc": "cuda_ipc://*",
}
HERE = "127.0.0.1"
NOBODY = {"inproc": "inproc://nobody", "shm": "shm://nobody", "cuda_ipc": "cuda_ipc://nobody"}
GENERATION = 7
SHALLOW = TransportConfig(buffer_bytes=64 << 10)
"""Small socket buffers: a large ship cannot vanish into them whole."""
ONE_STREAM = TransportConfig(buffer_bytes=64 << 10, streams=1)
"""A ship is one part: met in the middle, it is in the middle of its bytes, not between two parts."""


def bind(scheme: str, host: str) -> str:
    """Where a receiver of a scheme listens on a host."""
    return BIND[scheme].replace(HERE, host)


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until ``condition`` holds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 -- bytes in memory set no event
            await asyncio.sleep(0)


def as_pool(scheme: str, memory: memoryview) -> memoryview | DeviceMemory:
    """The memory as an end of this transport wants it, under the stand-in for a driver; the caller keeps it alive."""
    if scheme not in ON_DEVICES:
        return memory
    return DeviceMemory(np.frombuffer(memory, np.uint8).ctypes.data, memory.nbytes, 0)


class Harbor:
    """A receiver with its pool, and what it has reported."""

    def __init__(
        self, scheme: str, blocks: int, block_bytes: int, config: TransportConfig = SHALLOW, *, host: str = HERE
    ) -> None:
        self.block_bytes = block_bytes
        self.pool = np.full((blocks, block_bytes), POISON, np.uint8)
        self.receiver: Receiver = make_receiver(bind(scheme, host), as_pool(scheme, memoryview(self.pool)), config)
        self.landed: list[Landed] = []
        self.broken: list[tuple[bytes, TransferError]] = []

    @property
    def address(self) -> str:
        return self.receiver.address

    def open(self, blocks: Sequence[int], generation: int = GENERATION, sender: str = "") -> bytes:
        """A window on ``blocks``, for ``sender`` alone where it is named; returns its ticket."""
        ticket = secrets.token_bytes(16)
        window = Window(ticket, tuple(blocks), (generation,) * len(blocks), self.block_bytes, sender=sender)
        self.receiver.open(window, self.landed.append, lambda ticket, error: self.broken.append((ticket, error)))
        return ticket

    def poison(self) -> None:
        self.pool[:] = POISON

    @property
    def poisoned(self) -> bool:
        return bool((self.pool == POISON).all())


class Quay:
    """A sender with its pool."""

    def __init__(self, scheme: str, blocks: int, block_bytes: int, config: TransportConfig = SHALLOW) -> None:
        self.block_bytes = block_bytes
        memory, descriptor = allocate(blocks * block_bytes)
        self.pool = np.frombuffer(memory, np.uint8).reshape(blocks, block_bytes)
        # No byte equals the poison, so that "written" can be told from "poisoned".
        self.pool[:] = np.random.default_rng(blocks).integers(0, POISON, (blocks, block_bytes), np.uint8)
        try:
            self.sender: Sender = make_sender(
                scheme, as_pool(scheme, memoryview(self.pool)), config, descriptor=descriptor
            )
        finally:
            os.close(descriptor)

    async def ship(
        self,
        address: str,
        ticket: bytes,
        pairs: Sequence[tuple[int, int]],
        generation: int = GENERATION,
    ) -> ShipReport:
        """Ship ``(source block, destination block)`` pairs, a span for each."""
        size = self.block_bytes
        spans = [Span(source * size, target * size, size) for source, target in pairs]
        return await self.sender.ship(address, ticket, spans, [(target, generation) for _, target in pairs])
