"""The receiver's side of one connection: takes announcements and chunks, copies them into the windows, answers.

Life cycle: hello -> [part -> chunks -> verdict]* -> closed. The carrier is started when the first ticket that is good
has been shown. Chunks of a part that was refused or withdrawn are taken, and go nowhere.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kv_transfer.carried import wire
from kv_transfer.carried.carrier import Carrier
from kv_transfer.carried.library import Library
from kv_transfer.carried.staging import Bytes, Copies, Piece, Sums, cut, scatter, take_in
from kv_transfer.carried.wire import Chunk, Kind
from kv_transfer.checksum import Checksum
from kv_transfer.gate import Gate
from kv_transfer.hello import Met, admit
from kv_transfer.transport import TransportConfig
from kv_transfer.ucx.handshake import held
from kv_transfer.ucx.loop_thread import settled, streams
from kv_transfer.windows import OpenWindow, Part, WindowBook
from protocol.errors import ChannelLost, IntegrityMismatch, KVFerryError, MalformedFrame, TicketRejected, TransferError

SIGN_EVERY = 0.1
"""Seconds between signs of life while the carrier starts."""
EXPECTED = frozenset({Kind.PART, Kind.CHUNK, Kind.WITHDRAW, Kind.INTRODUCTION})

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Berth:
    """What all connections of one receiver share.

    Attributes:
        library: that the carriers load.
        pool: that is written.
        book: its windows.
        copies: where chunks are scattered.
        config: of the receiver.
    """

    library: Library
    pool: Bytes
    book: WindowBook
    copies: Copies
    config: TransportConfig


class _Job:
    """One part: while it is live its chunks go into the window."""

    __slots__ = ("chunks", "index", "left", "live", "part", "ship", "sums", "window")

    def __init__(
        self, head: wire.PartHead, admitted: tuple[OpenWindow, Part] | None = None, sums: Sums | None = None
    ) -> None:
        self.ship, self.index = head.ship, head.index
        self.sums = sums
        self.live = admitted is not None
        self.window: OpenWindow | None = None
        self.part: Part | None = None
        if admitted is not None:
            self.window, self.part = admitted
        self.chunks = cut(self.part.targets) if self.part is not None else None
        self.left = sum([nbytes for _, nbytes in self.part.targets]) if self.part is not None else 0

    def take(self, chunk: Chunk) -> Sequence[Piece]:
        """Where a chunk belongs.

        Raises:
            MalformedFrame: it is not the part's next one.
        """
        if self.chunks is None:
            return ()
        pieces = next(self.chunks, [])
        wanted = sum([nbytes for _, nbytes in pieces])
        if chunk.nbytes != wanted:
            raise MalformedFrame(f"a chunk of {chunk.nbytes} bytes where {wanted} are left", field="nbytes")
        return pieces

    def verdict(self, kind: Kind, reason: str = "") -> bytes:
        """What became of it."""
        return wire.pack_verdict(kind, self.ship, self.index, reason)


def _kind(error: TicketRejected | IntegrityMismatch) -> Kind:
    return Kind.DAMAGED if isinstance(error, IntegrityMismatch) else Kind.REFUSED


class Serving:
    """One connection's conversation."""

    def __init__(self, berth: Berth, connection: socket.socket) -> None:
        self._berth = berth
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._met = Met("", b"")
        self._writer: asyncio.StreamWriter | None = None
        self._carrier: Carrier | None = None
        self._theirs: asyncio.Future[bytes] = self._loop.create_future()
        self._ready = False
        self._job: _Job | None = None
        self._held: dict[int, tuple[_Job, Chunk, Sequence[Piece]]] = {}
        self._moved: asyncio.Queue[int] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Serve until the peer goes, errs, or this task is cancelled; its carrier has been reaped when it returns."""
        try:
            reader, self._writer = await streams(self._connection)
            async with asyncio.timeout(self._berth.config.timeout):
                party = wire.party(self._berth.library.scheme, self._berth.config)
                self._met = await held(admit(party), reader, self._writer)
            while True:
                kind, length = await wire.read_head(reader, EXPECTED)
                await self._take(kind, length, reader)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            log.debug("a connection has ended: %s", error)
        except KVFerryError as error:
            log.warning("turned a peer away: %s", error)
        finally:
            await self._end()

    async def _end(self) -> None:
        if self._job is not None:
            self._abandon(self._job, ChannelLost("the sender's connection ended"))
        for task in self._tasks:
            task.cancel()
        try:
            await settled(self._tasks)
        finally:
            self._theirs.cancel()
            if self._writer is not None:
                self._writer.transport.abort()
            else:
                self._connection.close()
            # Each holds the other, and this the pool.
            carrier, self._carrier = self._carrier, None
            if carrier is not None:
                await carrier.close()

    async def _take(self, kind: Kind, length: int, reader: asyncio.StreamReader) -> None:
        match kind:
            case Kind.PART:
                await self._announced(length, reader)
            case Kind.CHUNK:
                self._chunk(wire.parse_chunk(await reader.readexactly(length)))
            case Kind.INTRODUCTION:
                body = await reader.readexactly(length)
                if not self._theirs.done():
                    self._theirs.set_result(body)
            case Kind.WITHDRAW:
                if self._job is not None:
                    self._abandon(self._job, ChannelLost("the sender gave the ship up"))

    async def _announced(self, length: int, reader: asyncio.StreamReader) -> None:
        head = await wire.read_part_head(reader, length)
        if self._held or (self._job is not None and self._job.live):
            raise MalformedFrame("a part before the end of another")
        try:
            window = self._berth.book.claim(head.ticket, self._met.name, head.spans, head.blocks)
            if self._berth.config.checksum and not head.summed:
                raise TicketRejected("the receiver takes nothing without a checksum")
        except TicketRejected as refusal:
            self._job = _Job(head)
            self._say(self._job.verdict(Kind.REFUSED, refusal.message))
            await wire.skip(reader, head.table_bytes)
            return
        tables = await reader.readexactly(head.table_bytes)
        part = wire.parse_tables(head, tables)
        try:
            window.admit(part, time.monotonic())
        except (TicketRejected, IntegrityMismatch) as refusal:
            self._job = _Job(head)
            self._say(self._job.verdict(_kind(refusal), refusal.message))
            return
        self._job = _Job(head, (window, part), Sums(head.raw + tables) if head.summed else None)
        if self._carrier is None:
            self._carrier = Carrier(self._berth.library, self._moved.put_nowait, self._carrier_lost, receives=True)
            self._tasks = [self._loop.create_task(work(self._carrier)) for work in (self._prepare, self._land)]
            for task in self._tasks:
                task.add_done_callback(self._worked)

    def _chunk(self, chunk: Chunk) -> None:
        if self._job is None or not self._ready or chunk.slot in self._held:
            raise MalformedFrame(f"a chunk in slot {chunk.slot} that nobody waits for", field="slot")
        assert self._carrier is not None, "ready"
        self._held[chunk.slot] = (self._job, chunk, self._job.take(chunk))
        self._carrier.move(chunk.slot, chunk.nbytes)

    async def _prepare(self, carrier: Carrier) -> None:
        starting = self._loop.create_task(self._start(carrier))
        try:
            while not starting.done():
                await asyncio.wait({starting}, timeout=SIGN_EVERY)
                self._say(wire.pack(Kind.WAIT))
            starting.result()
        except KVFerryError as error:
            self._carrier_lost(error)
        finally:
            starting.cancel()
            await settled({starting})

    async def _start(self, carrier: Carrier) -> None:
        introduction = await carrier.introduced()
        self._say(wire.pack_introduction(carrier.release, introduction))
        await carrier.connect(wire.parse_introduction(await self._theirs, carrier.release), self._met.key)
        self._ready = True
        self._say(wire.pack(Kind.READY))

    async def _land(self, carrier: Carrier) -> None:
        while True:
            slot = await self._moved.get()
            job, chunk, pieces = self._held[slot]
            if job.live:
                await self._copy(job, chunk, carrier.staging.slot(slot, chunk.nbytes), pieces)
            del self._held[slot]
            carrier.free(slot)
            self._say(wire.pack_taken(slot))
            if job.live:
                job.left -= chunk.nbytes
                if not job.left:
                    self._complete(job)

    async def _copy(self, job: _Job, chunk: Chunk, slot: Bytes, pieces: Sequence[Piece]) -> None:
        assert job.window is not None, "live"
        berth = self._berth
        checksum = job.sums.next() if job.sums is not None else None
        entered, total = await berth.copies.make(
            chunk.nbytes, partial(_scattered, slot, berth.pool, pieces, job.window.gate, checksum)
        )
        if not entered:
            self._fail(job, TicketRejected("the window is closed"))
        elif total is not None and total != chunk.total and job.live:
            reason = f"part {job.index} of ship {job.ship:x} has not the checksum that it was sent with"
            self._fail(job, IntegrityMismatch(reason))

    def _complete(self, job: _Job) -> None:
        assert job.window is not None, "live"
        assert job.part is not None, "live"
        try:
            landed = job.window.complete(job.part, time.monotonic())
        except (TicketRejected, IntegrityMismatch) as refusal:
            self._fail(job, refusal)
            return
        job.live = False
        self._say(job.verdict(Kind.LANDED))
        if landed is not None:
            job.window.report(landed)

    def _fail(self, job: _Job, error: TicketRejected | IntegrityMismatch) -> None:
        if job.live:
            self._abandon(job, error)
            self._say(job.verdict(_kind(error), error.message))

    def _abandon(self, job: _Job, error: TransferError) -> None:
        if job.live:
            job.live = False
            assert job.window is not None, "live"
            assert job.part is not None, "live"
            job.window.abandon(job.part, error)

    def _worked(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            # A fault of ours must cost this connection alone, and not hang it.
            log.error("a connection of a carried transport failed", exc_info=error)
            self._carrier_lost(ChannelLost(f"internal fault: {error}"))

    def _carrier_lost(self, error: KVFerryError) -> None:
        log.warning("a carrier is lost: %s", error)
        if self._job is not None and self._job.live:
            self._abandon(self._job, ChannelLost(error.message))
            self._say(self._job.verdict(Kind.BROKEN, error.message))
        if self._writer is not None:
            # What ends the conversation is the end of the connection; the verdict goes first.
            self._writer.transport.close()

    def _say(self, message: bytes) -> None:
        assert self._writer is not None, "greeted"
        self._writer.write(message)


def _scattered(
    slot: Bytes, pool: Bytes, pieces: Sequence[Piece], gate: Gate, checksum: Checksum | None
) -> tuple[bool, bytes | None]:
    """Copy a slot into the pool; returns whether the window was open, and the checksum where one is wanted.

    In a thread, or short.
    """
    if not gate.enter():
        return False, None
    try:
        scatter(slot, pool, pieces)
        return True, take_in(checksum, pool, pieces) if checksum is not None else None
    finally:
        gate.leave()
