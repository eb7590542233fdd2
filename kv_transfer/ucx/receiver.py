"""The decode side of the UCX transport.

Life cycle: made (memory registered, bound, thread running) -> windows open and close -> closed (thread joined, port
free, memory let go).
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from functools import partial

from kv_transfer.tcp.connection import listening
from kv_transfer.tcp.tuning import tune
from kv_transfer.transport import OnBroken, OnLanded, Receiver, TransportConfig, Window
from kv_transfer.ucx.address import form, resolve_bound
from kv_transfer.ucx.channel import Channel
from kv_transfer.ucx.loop_thread import LoopThread, settled
from kv_transfer.ucx.pool import Pool
from kv_transfer.ucx.serving import Berth, Moves, Serving
from kv_transfer.windows import WindowBook
from protocol.errors import ChannelLost

ACCEPT_PAUSE = 0.25
"""Seconds until the next try after a failed accept: out of descriptors, a ready listener would spin."""

log = logging.getLogger(__name__)


class UcxReceiver(Receiver):
    """See :class:`~kv_transfer.transport.Receiver`.

    Args:
        bind: ``ucx://host:port``, a host that senders can reach; port 0 takes a free one.
        pool: writable; closed at the end, or where this raises.
        config: timeout is what a new connection has for its hello, secret what it must know; max_connections bounds the
            channels.

    Raises:
        ConfigError: the address cannot be bound, or there is no UCX, or none for this memory.
    """

    def __init__(self, bind: str, pool: Pool, config: TransportConfig) -> None:
        self._config = config
        self._book = WindowBook(pool.nbytes, "ucx")
        self._moves = Moves()
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        """In the loop thread: the one that accepts, and one for each channel."""
        with ExitStack() as stack:
            stack.callback(pool.close)
            self._listener = listening(bind, resolve_bound(bind), config)
            stack.callback(self._listener.close)
            name = self._listener.getsockname()
            self._address = form(name[0], name[1])
            self._context = pool.context(config.ucx_tls)
            stack.pop_all()
        self._berth = Berth(self._context, pool, self._book, self._moves, config)
        self._thread = LoopThread(f"kv-ucx-receive-{name[1]}")
        self._thread.post(pool.enter)
        self._thread.submit(self._accept())

    @property
    def address(self) -> str:
        """``ucx://host:port``, with the port that was really taken."""
        return self._address

    def open(self, window: Window, on_landed: OnLanded, on_broken: OnBroken) -> None:
        """See :meth:`Receiver.open`."""
        if self._closed:
            raise ChannelLost("the receiver is closed")
        self._book.open(window, on_landed, on_broken)

    async def close_window(self, ticket: bytes) -> None:
        """See :meth:`Receiver.close_window`."""
        if self._book.shut_now(ticket):
            stopped = self._moves.stop(ticket)
            self._thread.post(partial(_kick, stopped))
        await self._book.close(ticket)

    async def close(self) -> None:
        """See :meth:`Receiver.close`."""
        if self._closed:
            return
        self._closed = True
        for ticket in self._book.tickets():
            await self.close_window(ticket)
        await self._thread.stop(self._end())
        self._listener.close()
        self._berth.pool.close(self._context)

    async def _end(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await settled(tasks)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        myself = asyncio.current_task()
        assert myself is not None, "a coroutine runs in a task"
        self._tasks.add(myself)
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                log.warning("accept failed, trying again shortly: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            if len(self._tasks) > self._config.max_connections:
                connection.close()
                continue
            tune(connection, self._config)
            task = loop.create_task(Serving(self._berth, connection).run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


def _kick(channels: list[Channel]) -> None:
    for channel in channels:
        channel.kick()
