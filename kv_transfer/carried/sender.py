"""The prefill side of the carried transports.

Life cycle: made -> ships come and go, connections and carriers are made when first needed and kept -> closed (carriers
reaped, connections closed, thread joined, memory let go).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kv_transfer.band import Band
from kv_transfer.carried.library import Library
from kv_transfer.carried.line import Line, Parcel, Wharf
from kv_transfer.carried.staging import Bytes, Copies, Piece
from kv_transfer.memory import as_bytes
from kv_transfer.ships import Ship, ShipBook, check_ship
from kv_transfer.span import Span
from kv_transfer.tcp import address as tcp_address
from kv_transfer.tcp.delivery import split
from kv_transfer.transport import Sender, ShipReport, TransportConfig
from kv_transfer.ucx.destination import Destination
from kv_transfer.ucx.loop_thread import settled
from kv_transfer.windows import Part
from protocol.errors import ChannelLost, ConfigError, TransferError


def as_tcp(scheme: str, address: str) -> str:
    """The same place as a ``tcp://`` address.

    Raises:
        ConfigError: it is not of the form ``scheme://host:port``.
    """
    if not address.startswith(f"{scheme}://"):
        raise ConfigError(f"address must be {scheme}://host:port, got {address!r}", field="address")
    return "tcp" + address.removeprefix(scheme)


class CarriedSender(Sender):
    """See :class:`~kv_transfer.transport.Sender`.

    Args:
        library: that the carriers load.
        memory: what is read; may be read-only.
        config: there is one connection per receiver, whatever ``streams`` says: a carrier is a process.

    Raises:
        ConfigError: the memory is not contiguous, or the library is not here.
    """

    def __init__(self, library: Library, memory: memoryview, config: TransportConfig) -> None:
        library.require()
        self._library = library
        self._memory: Bytes | None = np.frombuffer(as_bytes(memory, writable=False), np.uint8)
        self._nbytes = self._memory.nbytes
        self._config = replace(config, streams=1)
        self._book = ShipBook()
        self._copies = Copies(f"kv-{library.scheme}-send")
        self._destinations: dict[str, Destination[Parcel]] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    async def ship(
        self,
        address: str,
        ticket: bytes,
        spans: Sequence[Span],
        generations: Sequence[tuple[int, int]],
        *,
        band: Band | None = None,
    ) -> ShipReport:
        """See :meth:`Sender.ship`."""
        started = time.monotonic()
        ship = self._book.start(ticket)
        try:
            block_bytes = check_ship(spans, generations, self._nbytes, band)
            if spans:
                await self._send(ship, address, split(ship.number, spans, generations, block_bytes, 1))
        finally:
            self._book.finish(ship)
        return ShipReport(sum(span.nbytes for span in spans), len(spans), time.monotonic() - started)

    async def _send(self, ship: Ship, address: str, parts: Sequence[tuple[Part, Sequence[Piece]]]) -> None:
        parcels = [Parcel(ship.ticket, part, pieces, ship.gate) for part, pieces in parts]
        task = asyncio.get_running_loop().create_task(self._deliver(ship, address, parcels))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            ship.stop(ChannelLost("the ship was cancelled"))
            await settled({task})
            raise

    async def _deliver(self, ship: Ship, address: str, parcels: Sequence[Parcel]) -> None:
        def stop(error: TransferError) -> None:
            for parcel in parcels:
                parcel.stop(error)

        ship.on_stop(stop)
        destination = await self._destination(address)
        for parcel in parcels:
            await destination.send(parcel)
        ship.check()

    async def _destination(self, address: str) -> Destination[Parcel]:
        if address not in self._destinations:
            endpoint = await tcp_address.resolve(as_tcp(self._library.scheme, address))
            assert self._memory is not None, "nothing is shipped after the close"
            wharf = Wharf(self._library, self._memory, self._copies, self._config)
            self._destinations.setdefault(
                address, Destination(address, self._config, lambda: Line.open(endpoint, wharf))
            )
        return self._destinations[address]

    async def abort(self, ticket: bytes) -> None:
        """See :meth:`Sender.abort`."""
        await self._book.abort(ticket)

    async def close(self) -> None:
        """See :meth:`Sender.close`."""
        await self._book.close()
        await settled(tuple(self._under_way))
        destinations = tuple(self._destinations.values())
        self._destinations.clear()
        for destination in destinations:
            await destination.close()
        self._copies.close()
        self._memory = None
