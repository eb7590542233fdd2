"""The sender's side of one channel: describes a part and waits for the verdict. Lives in the loop thread.

Life cycle: open -> [part -> verdict]* -> closed. Once a part is described, the peer may read the pool for it until it
has answered, or until the connection and the UCX worker have both ended. A delivery returns or raises only then: a peer
that is stopped could otherwise go on reading when it resumes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any

from kv_transfer.tcp.address import Endpoint
from kv_transfer.tcp.tuning import tune
from kv_transfer.transport import TransportConfig
from kv_transfer.ucx import wire
from kv_transfer.ucx.channel import Channel
from kv_transfer.ucx.library import Context
from kv_transfer.ucx.loop_thread import settled, streams
from kv_transfer.ucx.wire import Verdict
from kv_transfer.windows import Part
from protocol.errors import ChannelLost, KVFerryError, TicketRejected, TransferError


class Parcel:
    """One part of a ship on its way.

    Attributes:
        stopped: set to the error with which its ship was stopped.
    """

    __slots__ = ("part", "sources", "stopped", "ticket")

    def __init__(self, ticket: bytes, part: Part, sources: Sequence[int]) -> None:
        self.ticket = ticket
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

    @classmethod
    async def open(cls, endpoint: Endpoint, context: Context, pool: tuple[int, int], config: TransportConfig) -> Line:
        """Connect and exchange hellos.

        Args:
            endpoint: of the receiver.
            context: of the pool.
            pool: its address and length.
            config: for the time limit.

        Raises:
            ChannelLost: nobody there, or no answer in time.
            VersionMismatch: the peer speaks another version, or has another release of UCX.
        """
        channel = Channel(context)
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(config.timeout):
                reader, writer = await streams(await _connected(endpoint, config))
                ours = wire.Hello(wire.ucx_release(context.library.version), *pool, context.key, channel.address())
                writer.write(wire.pack_hello(ours))
                theirs = await wire.read_hello(reader)
                wire.check_release(ours, theirs)
                channel.connect(theirs.worker, b"")
            return cls(channel, reader, writer, config.timeout)
        except BaseException as error:
            if writer is not None:
                writer.transport.abort()
            await settled({channel.close()})
            if isinstance(error, TimeoutError):
                raise ChannelLost(f"no progress for {config.timeout} seconds") from error
            if isinstance(error, OSError | asyncio.IncompleteReadError):
                raise ChannelLost(f"cannot connect: {error}") from error
            raise

    @property
    def alive(self) -> bool:
        """Whether the peer is still there, as far as is known."""
        return not self._reader.at_eof() and not self._writer.is_closing() and self._channel.alive

    async def deliver(self, parcel: Parcel, on_stall: Callable[[TransferError], None]) -> None:
        """Describe a part and wait until the peer has read it, or reads it no more.

        Args:
            parcel: the part.
            on_stall: called when the peer is given up for making no progress, which may be long before it is proved
                quiet.

        Raises:
            TicketRejected, ChannelLost: see :meth:`~kv_transfer.transport.Sender.ship`.
        """
        self._writer.write(wire.pack_part(parcel.ticket, parcel.part, parcel.sources))
        given_up: TransferError | None = None
        try:
            while True:
                answer = asyncio.create_task(wire.read_answer(self._reader, parcel.part))
                if given_up is None:
                    either: set[asyncio.Future[Any]] = {answer, parcel.stopped}
                    await asyncio.wait(either, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
                    if not answer.done():
                        given_up = self._give_up(parcel, on_stall)
                verdict, reason = await answer
                if verdict is not Verdict.PROGRESS:
                    break
        except (OSError, asyncio.IncompleteReadError) as error:
            await self.close()
            raise given_up or ChannelLost("the peer closed the connection") from error
        except KVFerryError:
            await self.close()
            raise
        if verdict is Verdict.BROKEN:
            await self.close()
        _judge(verdict, reason, given_up)

    def _give_up(self, parcel: Parcel, on_stall: Callable[[TransferError], None]) -> TransferError:
        self._writer.write(wire.pack_stop(parcel.part))
        if parcel.stopped.done():
            return parcel.stopped.result()
        error = ChannelLost(f"no progress for {self._timeout} seconds")
        on_stall(error)
        return error

    def cut(self) -> None:
        """End the connection now: a receiver that is stopped finds it ended before it believes what it read."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """End the connection and the worker."""
        self._writer.transport.abort()
        await settled({self._channel.close()})


def _judge(verdict: Verdict, reason: str, given_up: TransferError | None) -> None:
    if given_up is not None:
        raise given_up
    if verdict is Verdict.REFUSED:
        raise TicketRejected(reason)
    if verdict is not Verdict.LANDED:
        raise ChannelLost(f"the receiver stopped reading: {reason or 'no reason given'}")


async def _connected(endpoint: Endpoint, config: TransportConfig) -> socket.socket:
    family, where = endpoint
    connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        tune(connection, config)
        await asyncio.get_running_loop().sock_connect(connection, where)
    except BaseException:
        connection.close()
        raise
    return connection
