"""The decode side of the carried transports.

Life cycle: made (bound, accepting) -> windows open and close -> closed (carriers reaped, port free, thread joined,
memory let go).
"""

from __future__ import annotations

import asyncio
import logging
import socket

import numpy as np

from kv_transfer.carried.library import Library
from kv_transfer.carried.sender import as_tcp
from kv_transfer.carried.serving import Berth, Serving
from kv_transfer.carried.staging import Copies
from kv_transfer.memory import as_bytes
from kv_transfer.tcp.address import form, resolve_bound
from kv_transfer.tcp.tuning import tune
from kv_transfer.transport import OnBroken, OnLanded, Receiver, TransportConfig, Window
from kv_transfer.ucx.loop_thread import settled
from kv_transfer.windows import WindowBook
from protocol.errors import ChannelLost, ConfigError

BACKLOG = 512
ACCEPT_PAUSE = 0.25
"""Seconds until the next try after a failed accept: out of descriptors, a ready listener would spin."""

log = logging.getLogger(__name__)


class CarriedReceiver(Receiver):
    """See :class:`~kv_transfer.transport.Receiver`. Made on its event loop.

    Args:
        library: that the carriers load.
        bind: ``scheme://host:port``, a host that senders can reach; port 0 takes a free one.
        memory: writable.
        config: timeout is what a new connection has for its hello; max_connections bounds connections and carriers.

    Raises:
        ConfigError: the address cannot be bound, the memory not written, or the library is not here.
    """

    def __init__(self, library: Library, bind: str, memory: memoryview, config: TransportConfig) -> None:
        library.require()
        self._config = config
        pool = np.frombuffer(as_bytes(memory, writable=True), np.uint8)
        self._book = WindowBook(pool.nbytes, library.scheme)
        family, where = resolve_bound(as_tcp(library.scheme, bind))
        try:
            self._listener = socket.create_server(where, family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen at {bind!r}: {error}", field="address") from error
        self._listener.setblocking(False)
        name = self._listener.getsockname()
        self._address = library.scheme + form(name[0], name[1]).removeprefix("tcp")
        self._copies = Copies(f"kv-{library.scheme}-receive-{name[1]}")
        self._berth: Berth | None = Berth(library, pool, self._book, self._copies, config)
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    @property
    def address(self) -> str:
        """``scheme://host:port``, with the port that was really taken."""
        return self._address

    def open(self, window: Window, on_landed: OnLanded, on_broken: OnBroken) -> None:
        """See :meth:`Receiver.open`."""
        if self._berth is None:
            raise ChannelLost("the receiver is closed")
        self._book.open(window, on_landed, on_broken)

    async def close_window(self, ticket: bytes) -> None:
        """See :meth:`Receiver.close_window`."""
        await self._book.close(ticket)

    async def close(self) -> None:
        """See :meth:`Receiver.close`."""
        if self._berth is None:
            return
        self._berth = None
        for ticket in self._book.tickets():
            await self._book.close(ticket)
        self._accepting.cancel()
        await settled({self._accepting})
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await settled(tasks)
        self._listener.close()
        self._copies.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                log.warning("accept failed, trying again shortly: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            if self._berth is None or len(self._tasks) >= self._config.max_connections:
                connection.close()
                continue
            tune(connection, self._config)
            task = loop.create_task(Serving(self._berth, connection).run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
