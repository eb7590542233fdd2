"""The sender's connections to one receiver, and the parts that wait for one. Lives on the event loop.

Life cycle of a channel: opening -> idle <-> busy -> gone. A channel carries one part at a time, so cutting it harms no
other ship. Parts wait in the order they came; a channel that is lost takes its part with it, and the waiting parts
too, for a peer that is dead or stopped would let each of them wait as long.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from kv_transfer.gate import Gate, hand_back
from kv_transfer.tcp.address import Endpoint
from kv_transfer.tcp.delivery import deliver, greet
from kv_transfer.tcp.io_thread import IoThread
from kv_transfer.tcp.link import Link, OnDone
from kv_transfer.tcp.steps import Conversation
from kv_transfer.tcp.tuning import tune
from kv_transfer.transport import TransportConfig
from kv_transfer.windows import Part
from protocol.errors import ChannelLost, KVFerryError


class Parcel:
    """One part of a ship on its way.

    Attributes:
        done: finished when the part was acknowledged, refused or lost.
        restarted: whether it has met a dead idle channel before.
    """

    __slots__ = ("done", "gate", "part", "payload", "restarted", "ticket")

    def __init__(self, ticket: bytes, part: Part, payload: Sequence[memoryview], gate: Gate) -> None:
        self.ticket = ticket
        self.part = part
        self.payload = payload
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


class _Channel:
    """One connection as the event loop sees it."""

    def __init__(self, thread: IoThread, on_gone: Callable[[_Channel], None]) -> None:
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._on_gone = on_gone
        self._link: Link | None = None
        self.parcel: Parcel | None = None

    def open(self, connection: socket.socket, conversation: Conversation, on_done: OnDone) -> None:
        # In one command: an idle link takes whatever its peer does for the end.
        self._thread.post(partial(self._attach, connection, conversation, self._on_loop(on_done)))

    def begin(self, conversation: Conversation, on_done: OnDone) -> None:
        self._thread.post(partial(self._begin, conversation, self._on_loop(on_done)))

    def cut(self) -> None:
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


class Destination:
    """See the module.

    Args:
        address: for messages.
        endpoint: where to connect.
        threads: an endless turn of I/O threads.
        config: streams bounds the connections.
        on_empty: called when there is neither a channel nor a waiting part left.
    """

    def __init__(
        self,
        address: str,
        endpoint: Endpoint,
        threads: itertools.cycle[IoThread],
        config: TransportConfig,
        on_empty: Callable[[Destination], None],
    ) -> None:
        self.address = address
        self._endpoint = endpoint
        self._threads = threads
        self._config = config
        self._on_empty = on_empty
        self._queue: deque[Parcel] = deque()
        self._channels: set[_Channel] = set()
        self._idle: list[_Channel] = []
        self._opening = 0
        self._width = config.streams

    def submit(self, parcel: Parcel) -> None:
        """Send a parcel as soon as a channel is free."""
        self._queue.append(parcel)
        self._pump()

    def withdraw(self, parcel: Parcel) -> None:
        """Stop a parcel that is waiting or on its way."""
        for channel in self._channels:
            if channel.parcel is parcel:
                channel.cut()
        if parcel in self._queue:
            self._queue.remove(parcel)
        parcel.finish(ChannelLost("the ship was stopped"))

    def _pump(self) -> None:
        while self._queue and self._queue[0].done.done():
            self._queue.popleft()
        while self._queue and self._idle:
            self._start(self._idle.pop(), self._queue.popleft())
        while self._opening < len(self._queue) and len(self._channels) < self._width:
            self._open()
        if not self._queue:
            self._width = self._config.streams
        if not self._queue and not self._channels:
            self._on_empty(self)

    def _start(self, channel: _Channel, parcel: Parcel) -> None:
        channel.parcel = parcel
        conversation = deliver(parcel.ticket, parcel.part, parcel.payload, parcel.gate, self._config.timeout)
        channel.begin(conversation, partial(self._delivered, channel, parcel))

    def _open(self) -> None:
        family, where = self._endpoint
        try:
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            tune(connection, self._config)
            failure = connection.connect_ex(where)
        except OSError as error:
            self._fail_waiting(ChannelLost(f"no socket for {self.address}: {error}"))
            return
        if failure not in (0, errno.EINPROGRESS):
            connection.close()
            self._fail_waiting(ChannelLost(f"cannot connect to {self.address}: {os.strerror(failure)}"))
            return
        channel = _Channel(next(self._threads), self._gone)
        self._channels.add(channel)
        self._opening += 1
        channel.open(connection, greet(self._config.timeout), partial(self._opened, channel))

    def _opened(self, channel: _Channel, error: KVFerryError | None, alive: bool) -> None:
        self._opening -= 1
        if alive:
            self._idle.append(channel)
            self._pump()
            return
        self._channels.discard(channel)
        # A receiver may have no room for one more connection; what waits is then for those that there are.
        self._width = len(self._channels)
        if not self._channels:
            self._width = self._config.streams
            self._fail_waiting(_at(self.address, error or ChannelLost("the connection was closed")))
        self._pump()

    def _delivered(self, channel: _Channel, parcel: Parcel, error: KVFerryError | None, alive: bool) -> None:
        channel.parcel = None
        if error is None and not alive:
            error = ChannelLost("the receiver closes its connections")
            if not parcel.restarted:
                # The channel had gone while it was idle; the part has lost nothing.
                parcel.restarted = True
                self._channels.discard(channel)
                self._queue.appendleft(parcel)
                self._pump()
                return
        stopped = not parcel.gate.is_open
        parcel.finish(None if error is None else _at(self.address, error))
        if alive:
            self._idle.append(channel)
        else:
            self._channels.discard(channel)
            if isinstance(error, ChannelLost) and not stopped:
                self._fail_waiting(_at(self.address, error))
        self._pump()

    def _gone(self, channel: _Channel) -> None:
        # An idle channel that the peer closed; of the others their conversation has told.
        self._channels.discard(channel)
        if channel in self._idle:
            self._idle.remove(channel)
        self._pump()

    def _fail_waiting(self, error: KVFerryError) -> None:
        waiting, self._queue = self._queue, deque()
        for parcel in waiting:
            parcel.finish(error)


def _at(address: str, error: KVFerryError) -> KVFerryError:
    located = type(error)(f"{address}: {error.message}", field=error.field)
    located.__cause__ = error
    return located
