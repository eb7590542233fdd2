"""Ships that cannot go straight from the pool: packed into a bounded memory of our own, and sent from there.

The reader's blocks have another form, or the pool is not in host memory.

Life cycle of a piece of a ship (some of its target blocks): waits for room -> is packed, in a thread -> travels ->
gives its room back. While one piece travels the next is packed. A ship that is aborted begins no further piece.

Life cycle of a :class:`Staging`: made, :meth:`Staging.ship` and :meth:`Staging.abort` at will, closed once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kv_transfer.conversion import Conversion, convert
from kv_transfer.instructions import Ship
from kv_transfer.memory import as_bytes
from kv_transfer.room import Room
from kv_transfer.senders import Senders
from kv_transfer.span import Span
from kv_transfer.transport import Sender, ShipReport, TransportConfig
from protocol.errors import ChannelLost
from protocol.layout import KVLayout

PIECE_BYTES = 4 << 20
"""Longest piece of more than one block: long enough for its cost per ship, short enough to overlap with the next."""
PIECES_AHEAD = 2
"""Pieces of one ship that have room at a time."""
SHARES = 4
"""No piece of more than one block is longer than this part of the memory."""

Pack = Callable[[Conversion, memoryview], None]
"""Makes the target blocks 0, 1, ... of a conversion in the given memory; blocking."""
Gather = Callable[[tuple[int, ...], memoryview], None]
"""Copies whole blocks as they are, one behind the other, into the given memory; blocking."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some target blocks of a ship; the fields are those of the ship's."""

    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]
    generations: tuple[int, ...]
    tokens: range


@dataclass(slots=True, eq=False)
class _Passage:
    ticket: bytes
    stopped: bool = False

    def check(self) -> None:
        if self.stopped:
            raise ChannelLost("the ship was aborted")


def pieces(order: Ship, source_size: int, longest: int) -> Iterator[Piece]:
    """A ship's blocks in turn, as many to a piece as ``longest`` bytes hold, and at least one.

    Args:
        order: the ship.
        source_size: tokens per source block.
        longest: bytes.
    """
    size = order.layout.block_size
    count = max(1, longest // order.wire.block_bytes)
    first_source = order.tokens.start // source_size
    for first in range(0, len(order.target_blocks), count):
        tokens = order.tokens[first * size : (first + count) * size]
        begin, end = tokens.start // source_size, -(-tokens.stop // source_size)
        yield Piece(
            order.source_blocks[begin - first_source : end - first_source],
            order.target_blocks[first : first + count],
            order.generations[first : first + count],
            tokens,
        )


class Staging:
    """See the module.

    Args:
        layout: of the pool that is read.
        memory: in which pieces are packed; bounds what is under way.
        descriptor: of the sealed memfd that ``memory`` is the whole of, where it is one; closed at the end.
        pack: reads the pool.
        config: of the transports.
        gather: reads the pool for readers whose blocks are as ours; None leaves these to ``pack`` as well.
    """

    def __init__(
        self,
        layout: KVLayout,
        memory: memoryview,
        descriptor: int | None,
        pack: Pack,
        config: TransportConfig,
        gather: Gather | None = None,
    ) -> None:
        self._layout = layout
        self._memory = as_bytes(memory, writable=True)
        self._descriptor = descriptor
        self._pack = pack
        self._gather = gather
        self._room = Room(self._memory.nbytes)
        self._senders = Senders(self._memory, config, descriptor)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="staging")
        self._passages: set[_Passage] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    async def ship(self, address: str, order: Ship) -> ShipReport:
        """Carry a ship out.

        When this has returned or raised, no byte of the pool is read for it any more.

        Raises:
            LayoutMismatch: the layouts cannot be converted, or one block is longer than the memory.
            ChannelLost: as :meth:`Sender.ship`; also when it was aborted before its last piece.
            TransferError: as :meth:`Sender.ship`.
        """
        started = time.monotonic()
        passage = _Passage(order.ticket, self._closed)
        self._passages.add(passage)
        self._idle.clear()
        travelling: deque[asyncio.Task[ShipReport]] = deque()
        places: set[int] = set()
        reports: list[ShipReport] = []
        try:
            sender = self._senders.find(address)
            longest = min(PIECE_BYTES, self._memory.nbytes // SHARES)
            for piece in pieces(order, self._layout.block_size, longest):
                while len(travelling) >= PIECES_AHEAD:
                    reports.append(await travelling[0])
                    travelling.popleft()
                passage.check()
                place = await self._packed(order, piece)
                places.add(place)
                travelling.append(asyncio.create_task(self._send(sender, address, order, piece, place, places)))
            while travelling:
                reports.append(await travelling[0])
                travelling.popleft()
        finally:
            for task in travelling:
                task.cancel()
            await _until_done(travelling)
            # A task that is cancelled before its first step never comes to what it would give back.
            for place in places:
                self._room.give_back(place)
            self._passages.discard(passage)
            if not self._passages:
                self._idle.set()
        nbytes, spans = (sum(getattr(report, name) for report in reports) for name in ("nbytes", "spans"))
        return ShipReport(nbytes, spans, time.monotonic() - started)

    async def _packed(self, order: Ship, piece: Piece) -> int:
        nbytes = len(piece.target_blocks) * order.wire.block_bytes
        place = await self._room.take(nbytes, order.ticket)
        target = self._memory[place : place + nbytes]
        work = asyncio.get_running_loop().run_in_executor(self._thread, self._make, order, piece, target)
        try:
            await asyncio.shield(work)
        except BaseException:
            # The thread reads the pool, and writes here, until it is done, whoever has lost patience.
            await _until_done([work])
            self._room.give_back(place)
            raise
        return place

    def _make(self, order: Ship, piece: Piece, target: memoryview) -> None:
        if self._gather is not None and order.layout == self._layout and order.wire.as_in_pool:
            self._gather(piece.source_blocks, target)
            return
        count = range(len(piece.target_blocks))
        self._pack(convert(self._layout, piece.source_blocks, order.wire, count, piece.tokens), target)

    async def _send(
        self, sender: Sender, address: str, order: Ship, piece: Piece, place: int, places: set[int]
    ) -> ShipReport:
        """Send a piece from its place, which is then free, and no more among ``places``."""
        try:
            return await sender.ship(
                address,
                order.ticket,
                _spans(place, piece.target_blocks, order.wire.block_bytes),
                tuple(zip(piece.target_blocks, piece.generations, strict=True)),
            )
        finally:
            places.remove(place)
            self._room.give_back(place)

    async def abort(self, ticket: bytes) -> None:
        """Stop every ship of ``ticket``; each of them raises soon, and reads the pool until then."""
        self._stop(ticket)
        await self._senders.abort(ticket)

    def _stop(self, ticket: bytes) -> None:
        for passage in self._passages:
            if passage.ticket == ticket:
                passage.stopped = True
        self._room.refuse(ticket)

    async def close(self) -> None:
        """Stop every ship, close every connection, end the thread. May be called more than once."""
        if self._closed:
            return
        self._closed = True
        for ticket in {passage.ticket for passage in self._passages}:
            self._stop(ticket)
        await self._senders.close()
        await self._idle.wait()
        self._thread.shutdown(wait=True)
        if self._descriptor is not None:
            os.close(self._descriptor)


async def _until_done(works: Collection[asyncio.Future[Any]]) -> None:
    """Wait for all of them, whoever has lost patience meanwhile."""
    while not all(work.done() for work in works):
        with suppress(asyncio.CancelledError):
            await asyncio.wait(works)
    for work in works:
        # What it raised has been told, or is not wanted any more.
        if not work.cancelled():
            work.exception()


def _spans(place: int, targets: tuple[int, ...], block_bytes: int) -> list[Span]:
    """Blocks that lie one behind the other from ``place`` on, to where they belong; neighbours as one."""
    spans: list[Span] = []
    first = 0
    for index in range(1, len(targets) + 1):
        if index == len(targets) or targets[index] != targets[index - 1] + 1:
            spans.append(Span(place + first * block_bytes, targets[first] * block_bytes, (index - first) * block_bytes))
            first = index
    return spans
