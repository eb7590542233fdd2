"""What the two processes of a benchmark say to each other beside the transports: length-prefixed msgpack, bounded."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated

import msgspec

from kv_transfer.transport import TICKET_BYTES
from protocol.errors import ConnectionFailed, MalformedFrame

VERSION = 2
PREFIX_BYTES = 4
MAX_FRAME_BYTES = 32 << 20
MAX_ITEMS = 1 << 20

Text = Annotated[str, msgspec.Meta(max_length=4096)]
Ticket = Annotated[bytes, msgspec.Meta(min_length=TICKET_BYTES, max_length=TICKET_BYTES)]
Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
Items = Annotated[tuple[Natural, ...], msgspec.Meta(max_length=MAX_ITEMS)]


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Make a pool and a receiver on it. Answered by :class:`Prepared`."""

    version: Natural
    scheme: Text
    block_bytes: Positive
    blocks: Positive
    streams: Positive
    timeout: Seconds
    ucx_tls: Text = ""


class Open(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Open windows, ``blocks[i]`` under ``tickets[i]``; ``poison`` overwrites them first. Answered by Done."""

    tickets: Annotated[tuple[Ticket, ...], msgspec.Meta(max_length=4096)]
    blocks: Annotated[tuple[Items, ...], msgspec.Meta(max_length=4096)]
    poison: bool = False


class Close(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Wait until so many bytes have landed under each ticket, and close the windows. Answered by :class:`Closed`.

    The sender may know of the last byte before the receiving process's event loop does.
    """

    tickets: Annotated[tuple[Ticket, ...], msgspec.Meta(max_length=4096)]
    expected: Annotated[tuple[Natural, ...], msgspec.Meta(max_length=4096)]


class Checksum(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Asks for the checksum of the blocks. Answered by Sum."""

    blocks: Items


class Plain(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Take rounds of these bytes from one plain connection until it ends. Answered by Port."""

    offsets: Items
    sizes: Items


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """``address`` is the receiver's; ``host`` tells machines apart."""

    address: Text
    host: Text


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """It is done."""


class Closed(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Bytes that landed under each ticket, in their order."""

    landed: Items


class Sum(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """CRC-32 of the blocks, in their order."""

    crc: Natural


class Port(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Where the plain connection may come to, on the host of this connection."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """It could not be done: an error by its code."""

    code: Text
    text: Text


Request = Prepare | Open | Close | Checksum | Plain
Reply = Prepared | Done | Closed | Sum | Port | Failed

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


class Channel:
    """One framed connection. Life cycle: made on a connected stream -> messages -> closed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @property
    def local_host(self) -> str:
        """This end's address, under which the other end reached it."""
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def peer_host(self) -> str:
        """The other end's address."""
        return str(self._writer.get_extra_info("peername")[0])

    async def send(self, message: Request | Reply) -> None:
        """Send one message.

        Raises:
            ConnectionFailed: the other end is gone.
        """
        body = _encoder.encode(message)
        self._writer.write(len(body).to_bytes(PREFIX_BYTES) + body)
        try:
            await self._writer.drain()
        except OSError as error:
            raise ConnectionFailed(f"the other end is gone: {error}") from error

    async def request(self) -> Request | None:
        """The next request; None at the end of the connection. Raises as :meth:`reply`."""
        body = await self._frame()
        if body is None:
            return None
        try:
            return _requests.decode(body)
        except msgspec.MsgspecError as error:
            raise MalformedFrame(f"no request of a benchmark: {error}") from error

    async def reply(self) -> Reply:
        """The next reply.

        Raises:
            ConnectionFailed: the connection ended.
            MalformedFrame: the other end is no benchmark of this version.
        """
        body = await self._frame()
        if body is None:
            raise ConnectionFailed("the other end is gone")
        try:
            return _replies.decode(body)
        except msgspec.MsgspecError as error:
            raise MalformedFrame(f"no reply of a benchmark: {error}") from error

    async def close(self) -> None:
        """Close the connection, and wait for no peer that takes nothing; may be called more than once."""
        if self._writer.transport.get_write_buffer_size():
            self._writer.transport.abort()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _frame(self) -> bytes | None:
        try:
            size = int.from_bytes(await self._reader.readexactly(PREFIX_BYTES))
            if size > MAX_FRAME_BYTES:
                raise MalformedFrame(f"a frame of {size} bytes; at most {MAX_FRAME_BYTES} are allowed")
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError):
            return None
