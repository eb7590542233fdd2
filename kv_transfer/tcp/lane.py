"""Connections of one kind to one receiver, and the parts that wait for one. Lives on the event loop.

Parts wait in the order they came; a channel that is lost takes its part with it, and the waiting parts too, for a peer
that is dead or stopped would let each of them wait as long.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable
from functools import partial

from kv_transfer.tcp.address import Endpoint
from kv_transfer.tcp.channel import Channel, OnGone, Parcel
from kv_transfer.tcp.delivery import deliver
from kv_transfer.tcp.handshake import greet
from kv_transfer.tcp.tuning import tune
from kv_transfer.transport import TransportConfig
from protocol.errors import ChannelLost, KVFerryError


class Lane:
    """See the module.

    Args:
        address: for messages.
        endpoint: where to connect.
        make_channel: a channel without a connection.
        config: streams bounds the connections.
        on_shut_out: called with the waiting parts when no connection can be made and there is none.
        on_empty: called when there is neither a channel nor a waiting part left.
    """

    def __init__(
        self,
        address: str,
        endpoint: Endpoint,
        make_channel: Callable[[OnGone], Channel],
        config: TransportConfig,
        on_shut_out: Callable[[Lane, list[Parcel], KVFerryError], None],
        on_empty: Callable[[], None],
    ) -> None:
        self._address = address
        self._endpoint = endpoint
        self._make_channel = make_channel
        self._config = config
        self._on_shut_out = on_shut_out
        self._on_empty = on_empty
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Parcel] = deque()
        self._channels: set[Channel] = set()
        self._idle: list[Channel] = []
        self._opening = 0
        self._width = config.streams

    @property
    def is_empty(self) -> bool:
        """Neither a channel nor a waiting part."""
        return not self._channels and not self._queue

    @property
    def is_connected(self) -> bool:
        """Whether a connection has been made and not been lost."""
        return len(self._channels) > self._opening

    def submit(self, parcel: Parcel) -> None:
        """Send a parcel as soon as a channel is free."""
        self._queue.append(parcel)
        self._pump()

    def withdraw(self, parcel: Parcel) -> None:
        """Stop a parcel that is waiting or on its way."""
        for channel in tuple(self._channels):
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
        if self.is_empty:
            self._on_empty()

    def _start(self, channel: Channel, parcel: Parcel) -> None:
        channel.parcel = parcel
        conversation = deliver(
            parcel.ticket,
            parcel.part,
            parcel.payload,
            parcel.gate,
            self._config.timeout,
            checksum=self._config.checksum,
        )
        channel.begin(conversation, partial(self._delivered, channel, parcel))

    def _open(self) -> None:
        family, where = self._endpoint
        try:
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            tune(connection, self._config)
            failure = connection.connect_ex(where)
        except OSError as error:
            self._fail_waiting(ChannelLost(f"no socket for {self._address}: {error}"))
            return
        if failure not in (0, errno.EINPROGRESS):
            connection.close()
            self._fail_waiting(ChannelLost(f"cannot connect to {self._address}: {os.strerror(failure)}"))
            return
        channel = self._make_channel(self._gone)
        self._channels.add(channel)
        self._opening += 1
        channel.open(connection, greet(self._config), partial(self._opened, channel, self._loop.time()))

    def _pump_soon(self) -> None:
        # Not at once: a channel of the loop tells what it has done from within its own turn.
        self._loop.call_soon(self._pump)

    def _opened(self, channel: Channel, began: float, error: KVFerryError | None, alive: bool) -> None:
        self._opening -= 1
        self._pump_soon()
        if alive:
            self._idle.append(channel)
            return
        self._channels.discard(channel)
        # A receiver may have no room for one more connection; what waits is then for those that there are.
        self._width = len(self._channels)
        if not self._channels:
            self._width = self._config.streams
            error = _at(self._address, error or ChannelLost("the connection was closed"))
            if self._loop.time() - began >= self._config.timeout:
                # It does not move, and would let what waits run into the time limit once more on the other lane.
                self._fail_waiting(error)
                return
            waiting, self._queue = list(self._queue), deque()
            self._on_shut_out(self, waiting, error)

    def _delivered(self, channel: Channel, parcel: Parcel, error: KVFerryError | None, alive: bool) -> None:
        channel.parcel = None
        self._pump_soon()
        if error is None and not alive:
            error = ChannelLost("the receiver closes its connections")
            if not parcel.restarted:
                # The channel had gone while it was idle; the part has lost nothing.
                parcel.restarted = True
                self._channels.discard(channel)
                self._queue.appendleft(parcel)
                return
        stopped = not parcel.gate.is_open
        parcel.finish(None if error is None else _at(self._address, error))
        if alive:
            self._idle.append(channel)
        else:
            self._channels.discard(channel)
            if isinstance(error, ChannelLost) and not stopped:
                self._fail_waiting(_at(self._address, error))

    def _gone(self, channel: Channel) -> None:
        # An idle channel that the peer closed; of the others their conversation has told.
        self._channels.discard(channel)
        if channel in self._idle:
            self._idle.remove(channel)
        self._pump_soon()

    def _fail_waiting(self, error: KVFerryError) -> None:
        waiting, self._queue = self._queue, deque()
        for parcel in waiting:
            parcel.finish(error)


def _at(address: str, error: KVFerryError) -> KVFerryError:
    located = type(error)(f"{address}: {error.message}", field=error.field)
    located.__cause__ = error
    return located
