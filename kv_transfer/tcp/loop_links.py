"""Links that belong to the event loop: a small part goes out, and is acknowledged, without another thread.

Life cycle: made -> links come and go -> closed (every link closed). A conversation here must be short: its steps run
on the event loop, one non-blocking system call at a time.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
import time
from collections.abc import Callable

from kv_transfer.tcp.link import Link, OnDone
from kv_transfer.tcp.steps import Conversation
from protocol.errors import ChannelLost

TICK = 0.25
"""Seconds between looks at deadlines, while there are any."""


class LoopLinks:
    """What an I/O thread is to its links, on the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._links: set[Link] = set()
        self._watched: dict[socket.socket, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def attach(self, connection: socket.socket, on_closed: Callable[[Link], None]) -> Link:
        """A link on ``connection``."""

        def forget(link: Link) -> None:
            self._links.discard(link)
            on_closed(link)

        link = Link(connection, self, forget)
        self._links.add(link)
        return link

    def begin(self, link: Link, conversation: Conversation, on_done: OnDone) -> None:
        """Hold a conversation on an idle link, under the watch of the clock."""
        if self._timer is None:
            self._timer = self._loop.call_later(TICK, self._look)
        link.begin(conversation, on_done)

    def close(self) -> None:
        """Close every link."""
        for link in tuple(self._links):
            link.close(ChannelLost("this end is closed"))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def register(self, connection: socket.socket, events: int, link: Link) -> None:
        """See :class:`~kv_transfer.tcp.link.Watch`."""
        self._watched[connection] = 0
        self.modify(connection, events, link)

    def modify(self, connection: socket.socket, events: int, link: Link) -> None:
        """See :class:`~kv_transfer.tcp.link.Watch`."""
        before, self._watched[connection] = self._watched[connection], events
        added, dropped = events & ~before, before & ~events
        if added & selectors.EVENT_READ:
            self._loop.add_reader(connection, link.ready, selectors.EVENT_READ)
        if added & selectors.EVENT_WRITE:
            self._loop.add_writer(connection, link.ready, selectors.EVENT_WRITE)
        self._drop(connection, dropped)

    def unregister(self, connection: socket.socket) -> None:
        """See :class:`~kv_transfer.tcp.link.Watch`."""
        self._drop(connection, self._watched.pop(connection))

    def _drop(self, connection: socket.socket, events: int) -> None:
        if events & selectors.EVENT_READ:
            self._loop.remove_reader(connection)
        if events & selectors.EVENT_WRITE:
            self._loop.remove_writer(connection)

    def _look(self) -> None:
        self._timer = None
        now = time.monotonic()
        for link in tuple(self._links):
            link.expire(now)
        if any(link.deadline is not None for link in self._links):
            self._timer = self._loop.call_later(TICK, self._look)
