"""The receiver's side of one channel: takes descriptions, reads what they describe, answers. Lives in the loop thread.

Life cycle: hello -> [part -> pull -> answer]* -> closed. While a pull runs, the next request is awaited too: it can
only be a stop, or the end of the connection, and both end the pull.
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

from kv_transfer.ucx import wire
from kv_transfer.ucx.channel import Channel, Stop
from kv_transfer.ucx.library import Context
from kv_transfer.ucx.loop_thread import settled, streams
from kv_transfer.ucx.wire import Described, Verdict
from kv_transfer.windows import OpenWindow, WindowBook
from protocol.errors import ChannelLost, KVFerryError, MalformedFrame, TicketRejected

PROGRESS_EVERY = 0.1
"""Seconds between signs of life while a pull gets on."""

Ahead = asyncio.Task[Described | tuple[int, int]]

log = logging.getLogger(__name__)


class Pulls:
    """The pulls that run, by ticket, so that any thread may stop them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._running: dict[Stop, tuple[bytes, Channel]] = {}

    def add(self, stop: Stop, ticket: bytes, channel: Channel) -> None:
        """A pull is about to begin."""
        with self._lock:
            self._running[stop] = (ticket, channel)

    def remove(self, stop: Stop) -> None:
        """It has ended."""
        with self._lock:
            del self._running[stop]

    def stop(self, ticket: bytes) -> list[Channel]:
        """Set the flag of the ticket's pulls; returns their channels, which are to be kicked in their thread."""
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
        base: the memory's address.
        book: its windows.
        pulls: that run.
        timeout: seconds that a hello may take.
    """

    context: Context
    base: int
    book: WindowBook
    pulls: Pulls
    timeout: float


class Serving:
    """One channel's conversation."""

    def __init__(self, berth: Berth, connection: socket.socket) -> None:
        self._berth = berth
        self._connection = connection
        self._channel: Channel | None = None
        self._peer = wire.Hello((0, 0), 0, 0, b"", b"")

    async def run(self) -> None:
        """Serve until the peer goes, errs, or this task is cancelled; quiet and closed when it returns or raises."""
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await streams(self._connection)
            async with asyncio.timeout(self._berth.timeout):
                channel = await self._greet(reader, writer)
            await self._requests(channel, reader, writer)
        except (OSError, asyncio.IncompleteReadError, TimeoutError, ChannelLost) as error:
            log.debug("a channel has ended: %s", error)
        except KVFerryError as error:
            log.warning("turned a peer away: %s", error)
        finally:
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
        peer = await wire.read_hello(reader)
        context = self._berth.context
        channel = self._channel = Channel(context)
        ours = wire.Hello(wire.ucx_release(context.library.version), 0, 0, b"", channel.address())
        writer.write(wire.pack_hello(ours))
        # After the answer: the peer shall learn which release there is before it is turned away.
        wire.check_release(ours, peer)
        if not peer.key:
            raise MalformedFrame("a sender's hello has no memory key", field="key")
        channel.connect(peer.worker, peer.key)
        self._peer = peer
        return channel

    async def _requests(self, channel: Channel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ahead: Ahead = asyncio.create_task(wire.read_request(reader))
        try:
            while channel.alive:
                request = await ahead
                ahead = asyncio.create_task(wire.read_request(reader))
                # A stop that comes now has crossed with our answer.
                if isinstance(request, Described):
                    await self._part(channel, request, ahead, writer)
        finally:
            ahead.cancel()
            await settled({ahead})

    async def _part(self, channel: Channel, request: Described, ahead: Ahead, writer: asyncio.StreamWriter) -> None:
        part = request.part
        landed = None
        try:
            window = self._berth.book.find(request.ticket)
            spans = self._addresses(request)
            window.admit(part, time.monotonic())
            status = await self._pull(channel, window, request, spans, ahead, writer)
            if not window.gate.is_open:
                raise TicketRejected("the window is closed")
            if ahead.done() or self._spoken_to():
                window.abandon(part, ChannelLost("the sender stopped the ship"))
                answer = wire.pack_answer(part, Verdict.STOPPED)
            elif status:
                reason = channel.reason(status)
                window.abandon(part, ChannelLost(f"reading from the sender failed: {reason}"))
                answer = wire.pack_answer(part, Verdict.BROKEN, reason)
            else:
                landed = window.complete(part, time.monotonic())
                answer = wire.pack_answer(part, Verdict.LANDED)
        except TicketRejected as refusal:
            answer = wire.pack_answer(part, Verdict.REFUSED, refusal.message)
        writer.write(answer)
        if landed is not None:
            window.report(landed)

    def _addresses(self, request: Described) -> list[tuple[int, int, int]]:
        here, there = self._berth.base, self._peer.base
        for source, (_, nbytes) in zip(request.sources, request.part.targets, strict=True):
            if source + nbytes > self._peer.nbytes:
                raise TicketRejected(f"span {source}+{nbytes} lies outside the sender's memory")
        return [
            (here + target, there + source, nbytes)
            for source, (target, nbytes) in zip(request.sources, request.part.targets, strict=True)
        ]

    async def _pull(
        self,
        channel: Channel,
        window: OpenWindow,
        request: Described,
        spans: list[tuple[int, int, int]],
        ahead: Ahead,
        writer: asyncio.StreamWriter,
    ) -> int:
        stop = Stop()
        # Known to whoever shuts the gate before we are inside it: then it is stopped, or not let in.
        self._berth.pulls.add(stop, request.ticket, channel)
        try:
            if not window.gate.enter():
                raise TicketRejected("the window is closed")
            quiet = channel.pull(spans, stop)
            try:
                await self._watch(channel, quiet, ahead, lambda: _sign(writer, request))
            finally:
                stop.set()
                channel.kick()
                try:
                    await settled({quiet})
                finally:
                    window.gate.leave()
            return quiet.result()
        finally:
            self._berth.pulls.remove(stop)

    async def _watch(
        self, channel: Channel, quiet: asyncio.Future[int], ahead: Ahead, sign: Callable[[], None]
    ) -> None:
        seen = 0
        while not quiet.done() and not ahead.done():
            either: set[asyncio.Future[Any]] = {quiet, ahead}
            await asyncio.wait(either, timeout=PROGRESS_EVERY, return_when=asyncio.FIRST_COMPLETED)
            if channel.landed > seen and not quiet.done():
                seen = channel.landed
                sign()

    def _spoken_to(self) -> bool:
        # What the kernel has and the loop has not: a sender that is gone may have changed what we read.
        try:
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True


def _sign(writer: asyncio.StreamWriter, request: Described) -> None:
    writer.write(wire.pack_answer(request.part, Verdict.PROGRESS))
