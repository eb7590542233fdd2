"""One connection to a receiver as the event loop sees it, and the part that it carries.

Life cycle of a channel: opening -> idle <-> busy -> gone. A channel carries one part at a time, so cutting it harms no
other ship.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from kv_transfer.gate import Gate, hand_back
from kv_transfer.tcp.io_thread import IoThread
from kv_transfer.tcp.link import Link, OnDone
from kv_transfer.tcp.loop_links import LoopLinks
from kv_transfer.tcp.steps import Conversation
from kv_transfer.windows import Part
from protocol.errors import ChannelLost, KVFerryError


class Parcel:
    """One part of a ship on its way.

    Attributes:
        nbytes: of the payload.
        done: finished when the part was acknowledged, refused or lost.
        restarted: whether it has met a dead idle channel before.
    """

    __slots__ = ("done", "gate", "nbytes", "part", "payload", "restarted", "ticket")

    def __init__(self, ticket: bytes, part: Part, payload: Sequence[memoryview], gate: Gate) -> None:
        self.ticket = ticket
        self.part = part
        self.payload = payload
        self.nbytes = sum(view.nbytes for view in payload)
        self.gate = gate
        self.restarted = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finish(self, error: KVFerryError | None) -> None:
        """Settle ``done``; what has been settled stays."""
        self.payload = ()
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class Channel(ABC):
    """A connection; all methods and callbacks are the event loop's.

    Attributes:
        parcel: what it carries.
    """

    parcel: Parcel | None = None

    @abstractmethod
    def open(self, connection: socket.socket, conversation: Conversation, on_done: OnDone) -> None:
        """Take over ``connection``, on which a connect was begun, and hold the first conversation."""

    @abstractmethod
    def begin(self, conversation: Conversation, on_done: OnDone) -> None:
        """Hold a conversation on the idle channel; ``on_done`` may come before this returns."""

    @abstractmethod
    def cut(self) -> None:
        """Break the connection off, and the conversation with it."""


OnGone = Callable[[Channel], None]
"""Called when a channel has been closed."""


class ThreadChannel(Channel):
    """A channel whose bytes an I/O thread moves: for parts of any size."""

    def __init__(self, thread: IoThread, on_gone: OnGone) -> None:
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._on_gone = on_gone
        self._link: Link | None = None

    def open(self, connection: socket.socket, conversation: Conversation, on_done: OnDone) -> None:
        """See :meth:`Channel.open`."""
        # In one command: an idle link takes whatever its peer does for the end.
        self._thread.post(partial(self._attach, connection, conversation, self._on_loop(on_done)))

    def begin(self, conversation: Conversation, on_done: OnDone) -> None:
        """See :meth:`Channel.begin`."""
        self._thread.post(partial(self._begin, conversation, self._on_loop(on_done)))

    def cut(self) -> None:
        """See :meth:`Channel.cut`."""
        self._thread.post(self._cut)

    def _on_loop(self, on_done: OnDone) -> OnDone:
        return lambda error, alive: hand_back(self._loop, on_done, error, alive)

    def _attach(self, connection: socket.socket, conversation: Conversation, on_done: OnDone) -> None:
        self._link = self._thread.attach(connection, lambda _: hand_back(self._loop, self._on_gone, self))
        self._link.begin(conversation, on_done)

    def _begin(self, conversation: Conversation, on_done: OnDone) -> None:
        assert self._link is not None, "attached first"
        self._link.begin(conversation, on_done)

    def _cut(self) -> None:
        assert self._link is not None, "attached first"
        self._link.close(ChannelLost("the ship was stopped"))


class LoopChannel(Channel):
    """A channel whose bytes the event loop moves: for parts so small that handing them over costs more."""

    def __init__(self, links: LoopLinks, on_gone: OnGone) -> None:
        self._links = links
        self._on_gone = on_gone
        self._link: Link | None = None

    def open(self, connection: socket.socket, conversation: Conversation, on_done: OnDone) -> None:
        """See :meth:`Channel.open`."""
        self._link = self._links.attach(connection, lambda _: self._on_gone(self))
        self._links.begin(self._link, conversation, on_done)

    def begin(self, conversation: Conversation, on_done: OnDone) -> None:
        """See :meth:`Channel.begin`."""
        assert self._link is not None, "opened first"
        self._links.begin(self._link, conversation, on_done)

    def cut(self) -> None:
        """See :meth:`Channel.cut`."""
        assert self._link is not None, "opened first"
        self._link.close(ChannelLost("the ship was stopped"))
