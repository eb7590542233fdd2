"""The receiver's side of one channel: takes announcements, receives what they announce, answers. In the loop thread.

Life cycle: hello -> UCX addresses -> [part -> go -> bytes -> answer]* -> closed. While bytes come the next announcement
is awaited too: the sender makes none before it has its answer, so what ends that wait is the end of the connection,
which ends the part.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

from kv_transfer.checksum import Checksum, pieces
from kv_transfer.transport import TransportConfig
from kv_transfer.ucx import handshake, wire
from kv_transfer.ucx.channel import CLOSED, Channel, Stop
from kv_transfer.ucx.library import Context
from kv_transfer.ucx.loop_thread import settled, streams
from kv_transfer.ucx.pool import Pool
from kv_transfer.ucx.wire import PartHead, Verdict
from kv_transfer.windows import OpenWindow, Part, WindowBook
from protocol.errors import ChannelLost, IntegrityMismatch, KVFerryError, TicketRejected

PROGRESS_EVERY = 0.1
"""Seconds between signs of life while bytes come."""
SKIP_BYTES = 64 << 10

Ahead = asyncio.Task[PartHead]

log = logging.getLogger(__name__)


class Moves:
    """The moves that run, by ticket, so that any thread may stop them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._running: dict[Stop, tuple[bytes, Channel]] = {}

    def add(self, stop: Stop, ticket: bytes, channel: Channel) -> None:
        """A move is about to begin."""
        with self._lock:
            self._running[stop] = (ticket, channel)

    def remove(self, stop: Stop) -> None:
        """It has ended."""
        with self._lock:
            del self._running[stop]

    def stop(self, ticket: bytes) -> list[Channel]:
        """Set the flag of the ticket's moves; returns their channels, which are to be kicked in their thread."""
        with self._lock:
            found = [(stop, channel) for stop, (of, channel) in self._running.items() if of == ticket]
        for stop, _ in found:
            stop.set()
        return [channel for _, channel in found]


@dataclass(frozen=True, slots=True)
class Berth:
    """What all channels of one receiver share.

    Attributes:
        context: of the memory.
        pool: what is written.
        book: its windows.
        moves: that run.
        config: timeout is what a hello may take, secret what a peer must know.
    """

    context: Context
    pool: Pool
    book: WindowBook
    moves: Moves
    config: TransportConfig


class Serving:
    """One channel's conversation."""

    def __init__(self, berth: Berth, connection: socket.socket) -> None:
        self._berth = berth
        self._connection = connection
        self._channel: Channel | None = None
        self._stranger = b""
        """The peer's UCX address, until it has shown a ticket: UCX does not check what it unpacks."""
        self._peer = ""

    async def run(self) -> None:
        """Serve until the peer goes, errs, or this task is cancelled; quiet and closed when it returns or raises."""
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await streams(self._connection)
            async with asyncio.timeout(self._berth.config.timeout):
                channel = await self._greet(reader, writer)
            await self._parts(channel, reader, writer)
        except (OSError, asyncio.IncompleteReadError, TimeoutError, ChannelLost) as error:
            log.debug("a channel has ended: %s", error)
        except KVFerryError as error:
            log.warning("turned a peer away: %s", error)
        finally:
            self._berth.book.lost(self)
            try:
                if self._channel is not None:
                    await settled({self._channel.close()})
            finally:
                # After the worker: the end of the connection tells the sender that nothing is read any more.
                if writer is not None:
                    writer.transport.abort()
                else:
                    self._connection.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Channel:
        met = await handshake.admit(reader, writer, self._berth.config)
        self._peer = met.name
        theirs = await wire.read_worker(reader)
        context = self._berth.context
        channel = self._channel = handshake.opened(context, met)
        ours = handshake.own_worker(channel, context.library.version)
        writer.write(wire.pack_worker(ours))
        # After the answer: the peer shall learn which release there is before it is turned away.
        wire.check_release(ours, theirs)
        self._stranger = theirs.address
        return channel

    async def _parts(self, channel: Channel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ahead: Ahead = asyncio.create_task(wire.read_head(reader))
        try:
            while channel.alive:
                head = await ahead
                try:
                    window, part, wanted = await self._announced(head, reader)
                except TicketRejected as refusal:
                    writer.write(wire.pack_answer(head, Verdict.REFUSED, refusal.message))
                    await _skip(reader, head.table_bytes + head.tail_bytes)
                    ahead = asyncio.create_task(wire.read_head(reader))
                    continue
                ahead = asyncio.create_task(wire.read_head(reader))
                await self._part(channel, window, part, wanted, ahead, writer)
        finally:
            ahead.cancel()
            await settled({ahead})

    async def _announced(
        self, head: PartHead, reader: asyncio.StreamReader
    ) -> tuple[OpenWindow, Part, tuple[Checksum, bytes] | None]:
        """The window and the part of an announcement, and how its checksum begins and what it must come to."""
        window = self._berth.book.claim(head.ticket, self._peer, head.spans, head.blocks)
        if self._berth.config.checksum and not head.summed:
            raise TicketRejected("the receiver takes nothing without a checksum")
        table = await reader.readexactly(head.table_bytes)
        wanted = await reader.readexactly(head.tail_bytes)
        return window, wire.parse_tables(head, table), (Checksum(head.raw + table), wanted) if head.summed else None

    async def _part(
        self,
        channel: Channel,
        window: OpenWindow,
        part: Part,
        wanted: tuple[Checksum, bytes] | None,
        ahead: Ahead,
        writer: asyncio.StreamWriter,
    ) -> None:
        landed = None
        try:
            window.admit(part, time.monotonic(), self)
            status = await self._receive(channel, window, part, ahead, writer)
            if not window.gate.is_open:
                raise TicketRejected("the window is closed")
            if ahead.done() or self._spoken_to():
                window.abandon(part, ChannelLost("the sender gave the ship up"))
                return
            if status:
                reason = channel.reason(status)
                window.abandon(part, ChannelLost(f"receiving failed: {reason}"))
                answer = wire.pack_answer(part, Verdict.BROKEN, reason)
            elif wanted is not None and not await self._intact(window, part, *wanted):
                damage = IntegrityMismatch(
                    f"part {part.index} of ship {part.ship:x} has not the checksum that it was sent with"
                )
                window.abandon(part, damage)
                raise damage
            else:
                landed = window.complete(part, time.monotonic())
                answer = wire.pack_answer(part, Verdict.LANDED)
        except (TicketRejected, IntegrityMismatch) as refusal:
            verdict = Verdict.DAMAGED if isinstance(refusal, IntegrityMismatch) else Verdict.REFUSED
            answer = wire.pack_answer(part, verdict, refusal.message)
        writer.write(answer)
        if landed is not None:
            window.report(landed)

    async def _intact(self, window: OpenWindow, part: Part, checksum: Checksum, wanted: bytes) -> bool:
        for piece in pieces(self._berth.pool.views(part.targets)):
            if not window.gate.enter():
                raise TicketRejected("the window is closed")
            try:
                checksum.update(piece)
            finally:
                window.gate.leave()
            # Other channels are driven from this loop, too.
            await asyncio.sleep(0)
        return checksum.digest() == wanted

    async def _receive(
        self, channel: Channel, window: OpenWindow, part: Part, ahead: Ahead, writer: asyncio.StreamWriter
    ) -> int:
        if self._stranger:
            try:
                channel.connect(self._stranger)
            except ChannelLost as error:
                window.abandon(part, error)
                raise
            self._stranger = b""
        stop = Stop()
        # Known to whoever shuts the gate before we are inside it: then it is stopped, or not let in.
        self._berth.moves.add(stop, window.window.ticket, channel)
        try:
            if not window.gate.enter():
                raise TicketRejected("the window is closed")
            base = self._berth.pool.address
            quiet = channel.move([(base + offset, nbytes) for offset, nbytes in part.targets], stop, receives=True)
            writer.write(wire.pack_answer(part, Verdict.GO))
            try:
                await self._watch(channel, quiet, ahead, lambda: writer.write(wire.pack_answer(part, Verdict.PROGRESS)))
            finally:
                stop.set()
                channel.kick()
                try:
                    await settled({quiet})
                finally:
                    window.gate.leave()
            return quiet.result() or self._arrived()
        finally:
            self._berth.moves.remove(stop)

    def _arrived(self) -> int:
        try:
            self._berth.pool.arrived()
        except ChannelLost as error:
            log.warning("what was received cannot be used: %s", error)
            return CLOSED
        return 0

    async def _watch(
        self, channel: Channel, quiet: asyncio.Future[int], ahead: Ahead, sign: Callable[[], None]
    ) -> None:
        seen = 0
        while not quiet.done() and not ahead.done():
            either: set[asyncio.Future[Any]] = {quiet, ahead}
            await asyncio.wait(either, timeout=PROGRESS_EVERY, return_when=asyncio.FIRST_COMPLETED)
            if channel.moved > seen and not quiet.done():
                seen = channel.moved
                sign()

    def _spoken_to(self) -> bool:
        # What the kernel has and the loop has not: a sender that is gone may have let go of what it sent.
        try:
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True


async def _skip(reader: asyncio.StreamReader, nbytes: int) -> None:
    while nbytes:
        nbytes -= len(await reader.readexactly(min(nbytes, SKIP_BYTES)))
