"""A thread that moves the bytes of many connections, so that the event loop never does.

Life cycle: made (running) -> stop() (every link closed, then the thread ends) -> joined. Other threads reach it only
through :meth:`IoThread.post`.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Thread

from kv_transfer.gate import hand_back
from kv_transfer.tcp.link import Link
from protocol.errors import ChannelLost

TICK = 0.25
"""Seconds between looks at deadlines."""
ACCEPTS_PER_TURN = 64

log = logging.getLogger(__name__)


class Door:
    """A listening socket; hands each new connection to ``on_accept``."""

    def __init__(
        self, listener: socket.socket, selector: selectors.BaseSelector, on_accept: Callable[[socket.socket], None]
    ) -> None:
        self.listener = listener
        self._selector = selector
        self._on_accept = on_accept
        self._watched = True
        selector.register(listener, selectors.EVENT_READ, self)

    def ready(self, events: int) -> None:
        """Accept what waits."""
        del events
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, _ = self.listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors: a ready listener would spin until one is given back.
                log.warning("accept failed, trying again shortly: %s", error)
                self._selector.unregister(self.listener)
                self._watched = False
                return
            self._on_accept(connection)

    def expire(self, now: float) -> None:
        """Look at the listener again after a failed accept."""
        del now
        if not self._watched:
            self._watched = True
            self._selector.register(self.listener, selectors.EVENT_READ, self)

    def close(self) -> None:
        """Give the port up."""
        if self._watched:
            self._selector.unregister(self.listener)
        self.listener.close()


class IoThread:
    """One selector, one thread, many links."""

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._commands: deque[Callable[[], None]] = deque()
        self._links: set[Link] = set()
        self._door: Door | None = None
        self._on_end: Callable[[], None] | None = None
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        self._thread = Thread(target=self._run, name=name)
        self._thread.start()

    def post(self, command: Callable[[], None]) -> None:
        """Run ``command`` in the thread; after :meth:`stop` it is dropped."""
        self._commands.append(command)
        # A full pipe wakes as well as one more byte would; a closed one has nobody behind it.
        with suppress(OSError):
            self._wake_in.send(b"\0")

    def attach(self, connection: socket.socket, on_closed: Callable[[Link], None]) -> Link:
        """A link on ``connection``; only from within the thread."""

        def forget(link: Link) -> None:
            self._links.discard(link)
            on_closed(link)

        link = Link(connection, self._selector, forget)
        self._links.add(link)
        return link

    def listen(self, listener: socket.socket, on_accept: Callable[[socket.socket], None]) -> None:
        """Accept connections on ``listener``, which the thread closes when it stops; only from within the thread."""
        self._door = Door(listener, self._selector, on_accept)

    async def stop(self) -> None:
        """Close every link and end the thread. Once only."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def finish() -> None:
            if not ended.done():
                ended.set_result(None)

        def end() -> None:
            self._on_end = lambda: hand_back(loop, finish)

        self.post(end)
        try:
            await ended
        finally:
            # The thread has nothing left to wait for, so this returns at once.
            self._thread.join()
            self._wake_in.close()

    def _run(self) -> None:
        next_look = time.monotonic()
        while self._on_end is None:
            for key, events in self._selector.select(TICK if self._links or self._door else None):
                if key.data is None:
                    with suppress(BlockingIOError):
                        self._wake_out.recv(4096)
                else:
                    key.data.ready(events)
            while self._commands:
                self._commands.popleft()()
            now = time.monotonic()
            if now >= next_look:
                next_look = now + TICK
                self._expire(now)
        self._end(self._on_end)

    def _expire(self, now: float) -> None:
        for link in tuple(self._links):
            link.expire(now)
        if self._door is not None:
            self._door.expire(now)

    def _end(self, on_end: Callable[[], None]) -> None:
        if self._door is not None:
            self._door.close()
        for link in tuple(self._links):
            link.close(ChannelLost("this end is closed"))
        self._selector.close()
        self._wake_out.close()
        on_end()
