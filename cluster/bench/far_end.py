"""The receiving process of a benchmark.

Life cycle: bound -> one peer at a time: prepared, windows open and close, gone -> closed. Everything a peer had here
ends with its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import zlib
from collections.abc import Callable

from cluster.bench import memory, plain_socket
from cluster.bench.ending import to_the_end
from cluster.bench.endpoint import bound_receiver, host_identity
from cluster.bench.message import (
    VERSION,
    Channel,
    Checksum,
    Close,
    Closed,
    Done,
    Failed,
    Open,
    Plain,
    Port,
    Prepare,
    Prepared,
    Reply,
    Request,
    Sum,
)
from kv_transfer.transport import Landed, Receiver, TransportConfig, Window
from protocol.errors import ConfigError, KVFerryError, Overloaded, ProtocolError, TransferError, VersionMismatch

GENERATION = 1
POISON = b"\xa5" * (1 << 16)
BUSY_SECONDS = 10.0
"""A peer waits so long for the one before it to leave."""
LANDING_SECONDS = 5.0
"""For what was acknowledged already to be told to the event loop."""


async def serve(host: str, port: int, *, max_pool: int, on_bound: Callable[[str, int], None], tied: bool) -> None:
    """Serve peers until cancelled, or with ``tied`` until standard input ends.

    Args:
        host: where peers come to, and where the transports' receivers listen.
        port: 0 takes a free one.
        max_pool: bytes of a pool at most; a peer that asks for more is refused.
        on_bound: called once, with what was really bound.
        tied: whether another process holds standard input open as long as it wants this one.

    Raises:
        ConfigError: the address cannot be taken.
    """
    busy = asyncio.Lock()

    async def come(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        try:
            try:
                # The one before may be just about to leave.
                await asyncio.wait_for(busy.acquire(), BUSY_SECONDS)
            except TimeoutError:
                await channel.send(Failed(code=Overloaded.code, text="another benchmark runs there now"))
                return
            try:
                await _Visit(channel, max_pool).run()
            finally:
                busy.release()
        except (KVFerryError, OSError) as error:
            print(f"a peer was turned away: {error}", file=sys.stderr)
        finally:
            await channel.close()

    visits: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(come(reader, writer))
        visits.add(task)
        task.add_done_callback(visits.discard)

    try:
        server = await asyncio.start_server(accept, host, port)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}:{port}: {error}", field="listen") from error
    try:
        on_bound(*server.sockets[0].getsockname()[:2])
        await (_input_ended() if tied else asyncio.Event().wait())
    finally:
        server.close()
        for task in tuple(visits):
            task.cancel()
        await asyncio.gather(*visits, return_exceptions=True)


async def _input_ended() -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def look() -> None:
        if not os.read(sys.stdin.fileno(), 1):
            ended.set()

    loop.add_reader(sys.stdin.fileno(), look)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(sys.stdin.fileno())


class _Visit:
    """What one peer has here."""

    def __init__(self, channel: Channel, max_pool: int) -> None:
        self._channel = channel
        self._max_pool = max_pool
        self._stack = contextlib.ExitStack()
        self._memory = memoryview(b"")
        self._block_bytes = 1
        self._receiver: Receiver | None = None
        self._landed: dict[bytes, int] = {}
        self._news = asyncio.Event()
        self._plain: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Answer requests until the peer goes."""
        try:
            while (request := await self._channel.request()) is not None:
                try:
                    reply = await self._answer(request)
                except KVFerryError as error:
                    reply = Failed(code=error.code, text=error.message[:4096])
                await self._channel.send(reply)
        finally:
            await to_the_end(self._end())

    async def _end(self) -> None:
        await self._end_plain()
        if self._receiver is not None:
            await self._receiver.close()
        self._stack.close()

    async def _answer(self, request: Request) -> Reply:
        match request:
            case Prepare():
                return await self._prepare(request)
            case Open(tickets=tickets, blocks=blocks, poison=poison):
                return self._open(tickets, blocks, poison)
            case Close(tickets=tickets, expected=expected):
                return await self._close(tickets, expected)
            case Checksum(blocks=blocks):
                views = [self._block(block) for block in blocks]
                return Sum(crc=await asyncio.to_thread(checksum, views))
            case Plain(offsets=offsets, sizes=sizes):
                return await self._listen_plain(offsets, sizes)

    async def _prepare(self, wanted: Prepare) -> Prepared:
        if wanted.version != VERSION:
            raise VersionMismatch(f"this end speaks version {VERSION} of the benchmark, the other {wanted.version}")
        if self._receiver is not None:
            raise ProtocolError("prepared already")
        nbytes = wanted.block_bytes * wanted.blocks
        if nbytes > self._max_pool:
            raise ConfigError(
                f"a pool of {nbytes >> 20} MiB is more than --max-pool of the listening side allows "
                f"({self._max_pool >> 20} MiB)",
                field="max_pool",
            )
        memory.check_room(nbytes)
        self._memory = self._stack.enter_context(memory.made_pool(nbytes)).view
        self._block_bytes = wanted.block_bytes
        await asyncio.to_thread(memory.fill, self._memory, POISON)
        config = TransportConfig(streams=wanted.streams, timeout=wanted.timeout, ucx_tls=wanted.ucx_tls)
        self._receiver = bound_receiver(wanted.scheme, self._channel.local_host, self._memory, config)
        return Prepared(address=self._receiver.address, host=host_identity())

    def _open(self, tickets: tuple[bytes, ...], blocks: tuple[tuple[int, ...], ...], poison: bool) -> Done:
        if self._receiver is None or len(tickets) != len(blocks):
            raise ProtocolError("Open needs a pool, and as many tickets as lists of blocks")
        for ticket, chosen in zip(tickets, blocks, strict=True):
            window = Window(ticket, chosen, (GENERATION,) * len(chosen), self._block_bytes)
            self._receiver.open(window, self._count, _ignore)
            self._landed[ticket] = 0
            if poison:
                for block in chosen:
                    memory.fill(self._block(block), POISON)
        return Done()

    def _count(self, landed: Landed) -> None:
        self._landed[landed.ticket] += landed.nbytes
        self._news.set()

    async def _close(self, tickets: tuple[bytes, ...], expected: tuple[int, ...]) -> Closed:
        if self._receiver is None or len(tickets) != len(expected):
            raise ProtocolError("Close needs a pool, and as many tickets as sizes")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LANDING_SECONDS):
                while any(self._landed.get(ticket, 0) < size for ticket, size in zip(tickets, expected, strict=True)):
                    self._news.clear()
                    await self._news.wait()
        landed = []
        for ticket in tickets:
            await self._receiver.close_window(ticket)
            landed.append(self._landed.pop(ticket, 0))
        return Closed(landed=tuple(landed))

    async def _listen_plain(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Port:
        if len(offsets) != len(sizes) or any(
            offset + size > self._memory.nbytes for offset, size in zip(offsets, sizes, strict=True)
        ):
            raise ProtocolError("Plain needs a size for each offset, within the pool")
        await self._end_plain()
        buffers = [self._memory[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
        listener = plain_socket.listen(self._channel.local_host)
        self._plain = asyncio.create_task(plain_socket.serve(listener, buffers))
        return Port(port=listener.getsockname()[1])

    async def _end_plain(self) -> None:
        plain, self._plain = self._plain, None
        if plain is not None:
            plain.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await plain

    def _block(self, block: int) -> memoryview:
        if (block + 1) * self._block_bytes > self._memory.nbytes:
            raise ProtocolError(f"block {block} lies outside the pool")
        return self._memory[block * self._block_bytes : (block + 1) * self._block_bytes]


def checksum(views: list[memoryview]) -> int:
    """CRC-32 of all bytes, in order."""
    crc = 0
    for view in views:
        crc = zlib.crc32(view, crc)
    return crc


def _ignore(_ticket: bytes, _error: TransferError) -> None:
    """The sender raises as well, and says more."""
