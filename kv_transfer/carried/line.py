"""The sender's side of one connection: announces a part, has its carrier move the chunks, waits for the verdict.

Life cycle: open -> [part -> chunks -> verdict -> drained]* -> closed. A part that is given up leaves the connection in
step as soon as the receiver has taken what had been moved; a receiver that does not do so at once loses it. The pool is
read only while a chunk is gathered, through the gate of its ship.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kv_transfer.carried import wire
from kv_transfer.carried.carrier import Carrier
from kv_transfer.carried.library import Library
from kv_transfer.carried.staging import SLOTS, Bytes, Copies, Piece, Sums, cut, gather, take_in
from kv_transfer.carried.wire import Chunk, Kind
from kv_transfer.checksum import Checksum
from kv_transfer.gate import Gate
from kv_transfer.hello import greet
from kv_transfer.tcp.address import Endpoint
from kv_transfer.tcp.connection import connected
from kv_transfer.transport import TransportConfig
from kv_transfer.ucx.handshake import held
from kv_transfer.ucx.loop_thread import settled, streams
from kv_transfer.windows import Part
from protocol.errors import ChannelLost, IntegrityMismatch, KVFerryError, TicketRejected, TransferError

DRAIN_SECONDS = 0.25
"""What a receiver has to take what was moved of a part that was given up."""
EXPECTED = frozenset({Kind.INTRODUCTION, Kind.READY, Kind.WAIT, Kind.TAKEN, *wire.VERDICTS})
REFUSALS = {Kind.REFUSED: TicketRejected, Kind.BROKEN: ChannelLost, Kind.DAMAGED: IntegrityMismatch}


@dataclass(frozen=True, slots=True)
class Wharf:
    """What all lines of one sender share.

    Attributes:
        library: that the carriers load.
        pool: that is read.
        copies: where chunks are gathered.
        config: of the sender.
    """

    library: Library
    pool: Bytes
    copies: Copies
    config: TransportConfig


class Parcel:
    """One part of a ship on its way.

    Attributes:
        ticket: of the window.
        part: as announced.
        pieces: of the pool that are sent.
        gate: of the ship.
        stopped: set to the error with which its ship was stopped.
    """

    __slots__ = ("gate", "part", "pieces", "stopped", "ticket")

    def __init__(self, ticket: bytes, part: Part, pieces: Sequence[Piece], gate: Gate) -> None:
        self.ticket = ticket
        self.part = part
        self.pieces = pieces
        self.gate = gate
        self.stopped: asyncio.Future[TransferError] = asyncio.get_running_loop().create_future()

    def stop(self, error: TransferError) -> None:
        """Let it be read no more; the first error stays."""
        if not self.stopped.done():
            self.stopped.set_result(error)


class Line:
    """A connection as its sender has it; made by :meth:`open`."""

    def __init__(self, wharf: Wharf, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> None:
        self._wharf = wharf
        self._key = key
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._heard_at = self._loop.time()
        self._lost: KVFerryError | None = None
        self._carrier: Carrier | None = None
        self._theirs: asyncio.Future[bytes] = self._loop.create_future()
        self._ready = False
        self._moving: set[int] = set()
        self._untaken: set[int] = set()
        self._awaited = (0, 0)
        self._verdict: tuple[Kind, str] | None = None
        self._reading = self._loop.create_task(self._read())
        self._preparing: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, endpoint: Endpoint, wharf: Wharf) -> Line:
        """Connect and exchange hellos.

        Raises:
            ChannelLost: nobody there, or no answer in time.
            VersionMismatch: the peer speaks another version.
            AuthenticationFailed: one end has no secret, or not the same one.
        """
        config = wharf.config
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(config.timeout):
                reader, writer = await streams(await connected(endpoint, config))
                met = await held(greet(wire.party(wharf.library.scheme, config)), reader, writer)
            return cls(wharf, reader, writer, met.key)
        except BaseException as error:
            if writer is not None:
                writer.transport.abort()
            if isinstance(error, TimeoutError):
                raise ChannelLost(f"no progress for {config.timeout} seconds") from error
            if isinstance(error, OSError | asyncio.IncompleteReadError):
                raise ChannelLost(f"cannot connect: {error}") from error
            raise

    @property
    def alive(self) -> bool:
        """Whether the peer is still there, as far as is known."""
        return self._lost is None

    async def deliver(self, parcel: Parcel) -> None:
        """Have the peer take a part.

        Raises:
            TicketRejected, IntegrityMismatch, ChannelLost: see :meth:`~kv_transfer.transport.Sender.ship`.
        """
        parcel.stopped.add_done_callback(lambda _: self._news.set())
        sums = self._announce(parcel)
        try:
            await self._until(parcel, lambda: self._ready)
            for pieces in cut(parcel.pieces):
                await self._until(parcel, lambda: self._free_slot() is not None)
                if self._verdict is not None:
                    break
                await self._load(parcel, pieces, sums)
            await self._until(parcel, lambda: False)
        except BaseException:
            self._writer.write(wire.pack(Kind.WITHDRAW))
            await self._drain()
            raise
        assert self._verdict is not None, "what was waited for"
        kind, reason = self._verdict
        if kind is not Kind.LANDED:
            await self._drain()
            raise REFUSALS[kind](reason)

    def _announce(self, parcel: Parcel) -> Sums | None:
        self._verdict, self._awaited = None, (parcel.part.ship, parcel.part.index)
        self._heard_at = self._loop.time()
        summed = self._wharf.config.checksum
        announcement = wire.pack_part(parcel.ticket, parcel.part, summed=summed)
        self._writer.write(wire.pack(Kind.PART, announcement))
        if self._preparing is None:
            self._preparing = self._loop.create_task(self._prepare())
        return Sums(announcement) if summed else None

    async def close(self) -> None:
        """End the connection and the carrier."""
        self._lose(ChannelLost("the connection was given up"))
        tasks = {self._reading, *({self._preparing} if self._preparing else ())}
        for task in tasks:
            task.cancel()
        await settled(tasks)
        self._theirs.cancel()
        await self._end_carrier()

    async def _load(self, parcel: Parcel, pieces: Sequence[Piece], sums: Sums | None) -> None:
        slot = self._free_slot()
        carrier = self._carrier
        assert slot is not None, "waited for"
        if carrier is None:
            raise self._lost or ChannelLost("the carrier is gone")
        nbytes = sum(piece[1] for piece in pieces)
        view = carrier.staging.slot(slot, nbytes)
        wharf = self._wharf
        total = await wharf.copies.make(
            nbytes, partial(_gathered, wharf.pool, pieces, view, parcel.gate, sums.next() if sums else None)
        )
        if parcel.stopped.done():
            raise parcel.stopped.result()
        if self._lost is not None:
            raise self._lost
        self._moving.add(slot)
        self._untaken.add(slot)
        carrier.move(slot, nbytes)
        self._writer.write(wire.pack_chunk(Chunk(slot, nbytes, total or b"")))

    def _free_slot(self) -> int | None:
        held = self._moving | self._untaken
        return next((slot for slot in range(SLOTS) if slot not in held), None)

    async def _until(self, parcel: Parcel, condition: Callable[[], bool]) -> None:
        """Wait for the condition, or a verdict; raises when neither can come."""
        while self._verdict is None and not condition():
            if parcel.stopped.done():
                raise parcel.stopped.result()
            await self._hear()

    async def _hear(self) -> None:
        if self._lost is not None:
            raise self._lost
        self._news.clear()
        try:
            async with asyncio.timeout_at(self._heard_at + self._wharf.config.timeout):
                await self._news.wait()
        except TimeoutError:
            lost = ChannelLost(f"no progress for {self._wharf.config.timeout} seconds")
            self._lose(lost)
            raise lost from None

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while self._moving or self._untaken:
                    await self._hear()
        except TimeoutError:
            self._lose(ChannelLost("the receiver did not take what was moved"))
        except KVFerryError as error:
            self._lose(error)

    async def _prepare(self) -> None:
        wharf = self._wharf
        if self._lost is not None:
            return
        try:
            carrier = self._carrier = Carrier(wharf.library, self._moved, self._lose, receives=False)
            introduction = await carrier.introduced()
            self._writer.write(wire.pack_introduction(carrier.release, introduction))
            await carrier.connect(wire.parse_introduction(await self._theirs, carrier.release), self._key)
        except KVFerryError as error:
            self._lose(error)

    async def _read(self) -> None:
        try:
            while True:
                kind, length = await wire.read_head(self._reader, EXPECTED)
                body = await self._reader.readexactly(length)
                self._heard_at = self._loop.time()
                self._take(kind, body)
                self._news.set()
        except (OSError, asyncio.IncompleteReadError):
            self._lose(ChannelLost("the peer closed the connection"))
        except KVFerryError as error:
            self._lose(error)
        finally:
            await self._end_carrier()

    async def _end_carrier(self) -> None:
        # Each holds the other, and this the pool.
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            await carrier.close()

    def _take(self, kind: Kind, body: bytes) -> None:
        match kind:
            case Kind.INTRODUCTION:
                if not self._theirs.done():
                    self._theirs.set_result(body)
            case Kind.READY:
                self._ready = True
            case Kind.TAKEN:
                slot = wire.parse_taken(body)
                self._untaken.discard(slot)
                if self._carrier is not None:
                    self._carrier.free(slot)
            case Kind.WAIT:
                pass
            case _:
                of, reason = wire.parse_verdict(body)
                # That of a part which was withdrawn meanwhile is of no interest.
                if of == self._awaited:
                    self._verdict = (kind, reason)

    def _moved(self, slot: int) -> None:
        self._moving.discard(slot)
        self._news.set()

    def _lose(self, error: KVFerryError) -> None:
        if self._lost is None:
            self._lost = error
            self._news.set()
            # The reader comes to its end by it, and ends the carrier.
            self._writer.transport.abort()


def _gathered(pool: Bytes, pieces: Sequence[Piece], slot: Bytes, gate: Gate, checksum: Checksum | None) -> bytes | None:
    """Fill a slot, unless the ship is stopped; returns the checksum where one is wanted. In a thread, or short."""
    if not gate.enter():
        return None
    try:
        gather(pool, pieces, slot)
        return take_in(checksum, pool, pieces) if checksum is not None else None
    finally:
        gate.leave()
