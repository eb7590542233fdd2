"""The decode side of the TCP transport.

Life cycle: made (bound, I/O threads running) -> windows open and close -> closed (threads joined, port free).
"""

from __future__ import annotations

import itertools
import logging
import socket
from functools import partial
from threading import BoundedSemaphore

from kv_transfer.memory import as_bytes
from kv_transfer.tcp.address import form, resolve_bound
from kv_transfer.tcp.connection import listening
from kv_transfer.tcp.io_thread import IoThread
from kv_transfer.tcp.serving import serve
from kv_transfer.tcp.tuning import tune
from kv_transfer.transport import OnBroken, OnLanded, Receiver, TransportConfig, Window
from kv_transfer.windows import WindowBook
from protocol.errors import ChannelLost, KVFerryError, ProtocolError

log = logging.getLogger(__name__)


class TcpReceiver(Receiver):
    """See :class:`~kv_transfer.transport.Receiver`.

    Args:
        bind: ``tcp://host:port``, a host that senders can reach; port 0 takes a free one.
        memory: writable.
        config: streams is the number of I/O threads, timeout what a new connection has for its hello.

    Raises:
        ConfigError: the address cannot be bound, or the memory not written.
    """

    def __init__(self, bind: str, memory: memoryview, config: TransportConfig) -> None:
        self._config = config
        self._memory = as_bytes(memory, writable=True)
        self._book = WindowBook(self._memory.nbytes, "tcp")
        self._closed = False
        self._room = BoundedSemaphore(config.max_connections)
        listener = listening(bind, resolve_bound(bind), config)
        name = listener.getsockname()
        self._address = form(name[0], name[1])
        self._threads = [IoThread(f"kv-receive-{name[1]}-{index}") for index in range(config.streams)]
        turns = itertools.cycle(self._threads)
        self._threads[0].post(partial(self._threads[0].listen, listener, partial(self._accept, turns)))

    @property
    def address(self) -> str:
        """``tcp://host:port``, with the port that was really taken."""
        return self._address

    def open(self, window: Window, on_landed: OnLanded, on_broken: OnBroken) -> None:
        """See :meth:`Receiver.open`."""
        if self._closed:
            raise ChannelLost("the receiver is closed")
        self._book.open(window, on_landed, on_broken)

    async def close_window(self, ticket: bytes) -> None:
        """See :meth:`Receiver.close_window`."""
        await self._book.close(ticket)

    async def close(self) -> None:
        """See :meth:`Receiver.close`."""
        if self._closed:
            return
        self._closed = True
        for ticket in self._book.tickets():
            await self._book.close(ticket)
        # The first thread accepts: stopped first, it gives the others nothing more to do.
        for thread in self._threads:
            await thread.stop()
        self._memory = memoryview(b"")

    def _accept(self, turns: itertools.cycle[IoThread], connection: socket.socket) -> None:
        if not self._room.acquire(blocking=False):
            connection.close()
            return
        connection.setblocking(False)
        tune(connection, self._config)
        thread = next(turns)
        thread.post(partial(self._serve, thread, connection))

    def _serve(self, thread: IoThread, connection: socket.socket) -> None:
        link = thread.attach(connection, lambda _: self._room.release())
        link.begin(serve(self._book, self._memory, self._config), _log_end)


def _log_end(error: KVFerryError | None, alive: bool) -> None:
    assert not alive, "a served connection ends only by being closed"
    if isinstance(error, ProtocolError):
        log.warning("turned a peer away: %s", error)
