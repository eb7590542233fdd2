"""Everything that goes to one receiver, in two lanes. Lives on the event loop.

The express lane takes ships of one small part, on connections of the event loop: for them a hand-over to another
thread and back costs more than the transfer. The other lane's connections belong to I/O threads. So a small ship never
waits behind a large one either.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

from kv_transfer.tcp.address import Endpoint
from kv_transfer.tcp.channel import Channel, LoopChannel, OnGone, Parcel, ThreadChannel
from kv_transfer.tcp.io_thread import IoThread
from kv_transfer.tcp.lane import Lane
from kv_transfer.tcp.loop_links import LoopLinks
from kv_transfer.transport import TransportConfig
from protocol.errors import KVFerryError

EXPRESS_BYTES = 1 << 20
"""Longest ship that the event loop sends itself: copying this much holds it up for a fraction of a millisecond."""


class Destination:
    """See the module.

    Args:
        address: for messages.
        endpoint: where to connect.
        threads: an endless turn of I/O threads.
        links: of the event loop.
        config: streams bounds the connections of each lane.
        on_empty: called when there is neither a channel nor a waiting part left.
    """

    def __init__(
        self,
        address: str,
        endpoint: Endpoint,
        threads: itertools.cycle[IoThread],
        links: LoopLinks,
        config: TransportConfig,
        on_empty: Callable[[Destination], None],
    ) -> None:
        def on_thread(on_gone: OnGone) -> Channel:
            return ThreadChannel(next(threads), on_gone)

        def lane(make_channel: Callable[[OnGone], Channel]) -> Lane:
            return Lane(address, endpoint, make_channel, config, self._shut_out, self._emptied)

        self.address = address
        self._on_empty = on_empty
        self._express = lane(partial(LoopChannel, links))
        self._freight = lane(on_thread)

    def submit(self, parcel: Parcel) -> None:
        """Send a parcel as soon as a channel is free."""
        small = parcel.part.count == 1 and parcel.nbytes <= EXPRESS_BYTES
        (self._express if small else self._freight).submit(parcel)

    def withdraw(self, parcel: Parcel) -> None:
        """Stop a parcel that is waiting or on its way."""
        self._express.withdraw(parcel)
        self._freight.withdraw(parcel)

    def _shut_out(self, lane: Lane, parcels: list[Parcel], error: KVFerryError) -> None:
        # A receiver that takes no more connections may still serve one of the other lane.
        other = self._freight if lane is self._express else self._express
        for parcel in parcels:
            if other.is_connected:
                other.submit(parcel)
            else:
                parcel.finish(error)

    def _emptied(self) -> None:
        if self._express.is_empty and self._freight.is_empty:
            self._on_empty(self)
