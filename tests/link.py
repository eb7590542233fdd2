"""The way from one worker to a router: a relay of bytes that can be cut, or fall silent with every connection open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

PIECE = 64 << 10


class Link:
    """Relays connections to one address; see :func:`link_to`.

    Attributes:
        endpoint: to connect to in place of the address.
    """

    def __init__(self, host: str, port: int) -> None:
        self.endpoint = ""
        self._target = host, port
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """End every connection at once; what is on its way is lost. New ones may be made."""
        for writer in self._writers:
            writer.transport.abort()

    def fall_silent(self) -> None:
        """Nothing goes through any more, and nobody is told."""
        self._flowing.clear()

    def resume(self) -> None:
        """What was held back goes on, in order."""
        self._flowing.set()

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with suppress(OSError):
                there, back = await asyncio.open_connection(*self._target)
                self._writers.add(back)
                try:
                    await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
                finally:
                    self._writers.discard(back)
                    back.transport.abort()
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(PIECE):
            await self._flowing.wait()
            writer.write(piece)
            await writer.drain()
        # An end on one side is one on the other.
        writer.transport.abort()


@asynccontextmanager
async def link_to(endpoint: str) -> AsyncIterator[Link]:
    """A link to ``tcp://host:port``; at the end no connection is left."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    link = Link(host, int(port))
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(link.relay(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    link.endpoint = "tcp://{}:{}".format(*server.sockets[0].getsockname()[:2])
    try:
        yield link
    finally:
        server.close()
        link.resume()
        link.cut()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
