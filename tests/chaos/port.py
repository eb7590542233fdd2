"""Both ends of one transport in one process, each with a pool of its own: what a survivor and its peers have alike."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import numpy as np
import psutil

from engine.shared_memory import allocate
from kv_transfer.span import Span
from kv_transfer.transport import Landed, TransportConfig, Window, make_receiver, make_sender
from protocol.errors import KVFerryError, TransferError

POOL_BYTES = 48 << 20
POISON = 0xA5
"""No byte of a source equals it, so that "written" can be told from "not written"."""
GENERATION = 7
BIND = {"shm": "shm://*", "tcp": "tcp://127.0.0.1:0", "ucx": "ucx://127.0.0.1:0"}
_PERIOD = (4 << 20) - 3
"""Not a multiple of any block, so that no two blocks are alike."""

Pairs = Sequence[Sequence[int]]
"""``(source block, destination block)`` each."""


def pattern() -> np.ndarray:
    """The same bytes in every process: what every source pool holds."""
    tile = np.random.default_rng(1).integers(0, POISON, _PERIOD, np.uint8)
    return np.resize(tile, POOL_BYTES)


class Port:
    """A sender and a receiver of one scheme.

    Attributes:
        source: what is shipped from here.
        pool: what is shipped into here.
        landed: blocks that have landed, by ticket.
        broken: tickets whose window was reported broken.
    """

    def __init__(self, scheme: str, config: TransportConfig, truth: np.ndarray) -> None:
        self.scheme = scheme
        self.truth = truth
        memory, descriptor = allocate(POOL_BYTES)
        self.source = np.frombuffer(memory, np.uint8)
        self.source[:] = truth
        self.pool = np.full(POOL_BYTES, POISON, np.uint8)
        try:
            self.sender = make_sender(scheme, memoryview(self.source), config, descriptor=descriptor)
        finally:
            os.close(descriptor)
        self.receiver = make_receiver(BIND[scheme], memoryview(self.pool), config)
        self.landed: dict[str, set[int]] = {}
        self.broken: set[str] = set()

    def open(self, ticket: str, blocks: Sequence[int], size: int) -> None:
        """Open a window on blocks of ``size`` bytes, and poison them."""
        self.poison(blocks, size)
        self.landed[ticket] = set()
        window = Window(bytes.fromhex(ticket), tuple(blocks), (GENERATION,) * len(blocks), size)
        self.receiver.open(window, self._landed, self._broken)

    def _landed(self, landed: Landed) -> None:
        self.landed[landed.ticket.hex()].update(landed.blocks)

    def _broken(self, ticket: bytes, _: TransferError) -> None:
        self.broken.add(ticket.hex())

    async def close(self, ticket: str) -> None:
        """Close the window; what has landed in it stays known until :meth:`forget`."""
        await self.receiver.close_window(bytes.fromhex(ticket))

    def forget(self, ticket: str) -> None:
        del self.landed[ticket]
        self.broken.discard(ticket)

    async def ship(self, address: str, ticket: str, size: int, chunks: Sequence[Pairs]) -> str:
        """Ship one chunk after the other; returns the code of the error that ended it, or "shipped"."""
        try:
            for chunk in chunks:
                spans = _spans(chunk, size)
                named = [(target, GENERATION) for _, target in chunk]
                await self.sender.ship(address, bytes.fromhex(ticket), spans, named)
        except KVFerryError as error:
            return error.code
        return "shipped"

    def poison(self, blocks: Sequence[int], size: int) -> None:
        self.pool.reshape(-1, size)[list(blocks)] = POISON

    def untouched(self, blocks: Sequence[int], size: int) -> bool:
        """Whether not one byte of the blocks has been written since they were poisoned."""
        return bool((self.pool.reshape(-1, size)[list(blocks)] == POISON).all())

    def right(self, pairs: Pairs, size: int) -> bool:
        """Whether the destination blocks hold what the source blocks of the sender did."""
        if not pairs:
            return True
        sources, targets = zip(*pairs, strict=True)
        return bool((self.pool.reshape(-1, size)[list(targets)] == self.truth.reshape(-1, size)[list(sources)]).all())

    def spoil(self, blocks: Sequence[int], size: int) -> None:
        """Use source blocks for something else, as their owner may once no ship of them is left."""
        self.source.reshape(-1, size)[list(blocks)] = POISON

    def mend(self, blocks: Sequence[int], size: int) -> None:
        """Give source blocks their bytes again."""
        self.source.reshape(-1, size)[list(blocks)] = self.truth.reshape(-1, size)[list(blocks)]

    def open_windows(self) -> int:
        return len(self.receiver._book.tickets())

    def open_ships(self) -> int:
        return len(self.sender._book._ships)

    async def shut(self) -> None:
        await self.sender.close()
        await self.receiver.close()


def _spans(pairs: Pairs, size: int) -> list[Span]:
    """Neighbours on both sides are one span, as in a real plan."""
    runs: list[list[int]] = []
    for source, target in pairs:
        if runs and runs[-1][0] + runs[-1][2] == source and runs[-1][1] + runs[-1][2] == target:
            runs[-1][2] += 1
        else:
            runs.append([source, target, 1])
    return [Span(source * size, target * size, count * size) for source, target, count in runs]


def holdings() -> dict[str, int]:
    """What this process holds of the machine."""
    process = psutil.Process()
    return {"threads": threading.active_count(), "fds": process.num_fds(), "rss": process.memory_info().rss}
