"""The sender's side of one channel: announces a part, sends it on "go", waits for the verdict. In the loop thread.

Life cycle: open -> [part -> go -> bytes -> verdict]* -> closed. A delivery that is given up takes the channel with it:
once its UCX worker is destroyed nobody reads the pool for it, whatever the peer does, and the end of the connection
tells the peer. The next answer is awaited all the time, so a peer that goes in between takes the channel with it, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from kv_transfer.tcp.address import Endpoint
from kv_transfer.tcp.connection import connected
from kv_transfer.transport import TransportConfig
from kv_transfer.ucx import handshake, wire
from kv_transfer.ucx.channel import Channel, Stop
from kv_transfer.ucx.library import Context
from kv_transfer.ucx.loop_thread import settled, streams
from kv_transfer.ucx.wire import Answer, Verdict
from kv_transfer.windows import Part
from protocol.errors import ChannelLost, IntegrityMismatch, KVFerryError, MalformedFrame, TicketRejected, TransferError

T = TypeVar("T")


class Parcel:
    """One part of a ship on its way.

    Attributes:
        frame: the announcement.
        part: what it announces.
        sources: ``(address, bytes)`` of what is sent.
        stopped: set to the error with which its ship was stopped.
    """

    __slots__ = ("frame", "part", "sources", "stopped")

    def __init__(self, frame: bytes, part: Part, sources: Sequence[tuple[int, int]]) -> None:
        self.frame = frame
        self.part = part
        self.sources = sources
        self.stopped: asyncio.Future[TransferError] = asyncio.get_running_loop().create_future()

    def stop(self, error: TransferError) -> None:
        """Let it be read no more; the first error stays."""
        if not self.stopped.done():
            self.stopped.set_result(error)


class Line:
    """A channel as its sender has it; made by :meth:`open`."""

    def __init__(
        self, channel: Channel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout: float
    ) -> None:
        self._channel = channel
        self._timeout = timeout
        self._reader = reader
        self._writer = writer
        self._delivering = False
        self._ending: asyncio.Future[None] | None = None
        self._answer = self._next_answer()

    @classmethod
    async def open(cls, endpoint: Endpoint, context: Context, config: TransportConfig) -> Line:
        """Connect, say hello, and exchange UCX addresses.

        Args:
            endpoint: of the receiver.
            context: of the pool.
            config: for the time limit, the secret and our name.

        Raises:
            ChannelLost: nobody there, or no answer in time.
            VersionMismatch: the peer speaks another version, or has another release of UCX.
            AuthenticationFailed: one end has no secret, or not the same one.
        """
        channel: Channel | None = None
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(config.timeout):
                reader, writer = await streams(await connected(endpoint, config))
                channel = handshake.opened(context, await handshake.greet(reader, writer, config))
                ours = handshake.own_worker(channel, context.library.version)
                writer.write(wire.pack_worker(ours))
                theirs = await wire.read_worker(reader)
                wire.check_release(ours, theirs)
                channel.connect(theirs.address)
            return cls(channel, reader, writer, config.timeout)
        except BaseException as error:
            if writer is not None:
                writer.transport.abort()
            if channel is not None:
                await settled({channel.close()})
            if isinstance(error, TimeoutError):
                raise ChannelLost(f"no progress for {config.timeout} seconds") from error
            if isinstance(error, OSError | asyncio.IncompleteReadError):
                raise ChannelLost(f"cannot connect: {error}") from error
            raise

    @property
    def alive(self) -> bool:
        """Whether the peer is still there, as far as is known."""
        return self._ending is None and not self._answer.done() and self._channel.alive

    async def deliver(self, parcel: Parcel) -> None:
        """Have the peer take a part; when this returns or raises, the pool is read no more for it.

        Raises:
            TicketRejected, IntegrityMismatch, ChannelLost: see :meth:`~kv_transfer.transport.Sender.ship`.
        """
        self._delivering = True
        try:
            await self._deliver(parcel)
        finally:
            self._delivering = False
            self._look()

    async def _deliver(self, parcel: Parcel) -> None:
        sent: asyncio.Future[int] | None = None
        try:
            self._writer.write(parcel.frame)
            verdict, reason = await self._verdict(parcel)
            while verdict in (Verdict.GO, Verdict.PROGRESS):
                if sent is None and verdict is Verdict.GO:
                    sent = self._channel.move(parcel.sources, Stop(), receives=False)
                verdict, reason = await self._verdict(parcel)
            if verdict is Verdict.REFUSED:
                raise TicketRejected(reason)
            if verdict is Verdict.DAMAGED:
                raise IntegrityMismatch(f"the receiver refused: {reason}")
            if verdict is not Verdict.LANDED or sent is None:
                raise ChannelLost(f"the receiver lost the connection: {reason}")
            await self._heard(parcel, sent)
        except TicketRejected:
            if sent is not None:
                await self.close()
            raise
        except (OSError, asyncio.IncompleteReadError) as error:
            await self.close()
            raise ChannelLost("the peer closed the connection") from error
        except KVFerryError:
            await self.close()
            raise

    async def _verdict(self, parcel: Parcel) -> tuple[Verdict, str]:
        answer = await self._heard(parcel, self._answer)
        self._answer = self._next_answer()
        if (answer.ship, answer.index) != (parcel.part.ship, parcel.part.index):
            raise MalformedFrame(f"not an answer to part {parcel.part.index} of ship {parcel.part.ship:x}")
        return answer.verdict, answer.reason

    async def _heard(self, parcel: Parcel, awaited: asyncio.Future[T]) -> T:
        either: set[asyncio.Future[Any]] = {awaited, parcel.stopped}
        await asyncio.wait(either, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
        if awaited.done():
            return awaited.result()
        if parcel.stopped.done():
            raise parcel.stopped.result()
        raise ChannelLost(f"no progress for {self._timeout} seconds")

    def _next_answer(self) -> asyncio.Task[Answer]:
        awaited = asyncio.ensure_future(wire.read_answer(self._reader))
        awaited.add_done_callback(lambda _: self._look())
        return awaited

    def _look(self) -> None:
        if self._answer.done() and not self._delivering:
            # The peer is gone, or it speaks unasked.
            self._end()

    def _end(self) -> asyncio.Future[None]:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._ended())
        return self._ending

    async def _ended(self) -> None:
        self._answer.cancel()
        await settled({self._channel.close(), self._answer})
        self._writer.transport.abort()

    async def close(self) -> None:
        """End the connection and the worker; when this returns, the pool is read no more by it."""
        await settled({self._end()})
