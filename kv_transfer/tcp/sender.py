"""The prefill side of the TCP transport.

Life cycle: made (I/O threads running) -> ships come and go, connections are made when first needed and kept -> closed
(connections closed, threads joined).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

from kv_transfer.band import Band
from kv_transfer.memory import as_bytes
from kv_transfer.ships import Ship, ShipBook, check_ship
from kv_transfer.span import Span
from kv_transfer.tcp.address import resolve
from kv_transfer.tcp.channel import Parcel
from kv_transfer.tcp.delivery import split
from kv_transfer.tcp.destination import Destination
from kv_transfer.tcp.io_thread import IoThread
from kv_transfer.tcp.loop_links import LoopLinks
from kv_transfer.transport import Sender, ShipReport, TransportConfig
from protocol.errors import TransferError


class TcpSender(Sender):
    """See :class:`~kv_transfer.transport.Sender`.

    Args:
        memory: what is read; may be read-only.
        config: streams is the number of I/O threads, and of connections per receiver and lane.
    """

    def __init__(self, memory: memoryview, config: TransportConfig) -> None:
        self._memory = as_bytes(memory, writable=False)
        self._config = config
        self._book = ShipBook()
        self._destinations: dict[str, Destination] = {}
        self._threads = [IoThread(f"kv-send-{index}") for index in range(config.streams)]
        self._links = LoopLinks()
        self._turns = itertools.cycle(self._threads)

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
            block_bytes = check_ship(spans, generations, self._memory.nbytes, band)
            if spans:
                await self._deliver(ship, address, spans, generations, block_bytes)
        finally:
            self._book.finish(ship)
        return ShipReport(sum(span.nbytes for span in spans), len(spans), time.monotonic() - started)

    async def _deliver(
        self,
        ship: Ship,
        address: str,
        spans: Sequence[Span],
        generations: Sequence[tuple[int, int]],
        block_bytes: int,
    ) -> None:
        destination = await self._destination(address)
        parts = split(ship.number, spans, generations, block_bytes, self._config.streams)
        parcels = [
            Parcel(ship.ticket, part, [self._memory[offset : offset + size] for offset, size in pieces], ship.gate)
            for part, pieces in parts
        ]

        def on_stop(error: TransferError) -> None:
            for parcel in parcels:
                parcel.finish(error)

        ship.on_stop(on_stop)
        try:
            for parcel in parcels:
                destination.submit(parcel)
            if len(parcels) == 1:
                # Not by way of gather, which would take another turn of the loop.
                await parcels[0].done
            else:
                await asyncio.gather(*[parcel.done for parcel in parcels])
        except BaseException:
            # Whatever ended it, the caller may change the source once this has raised.
            ship.gate.shut_now()
            for parcel in parcels:
                destination.withdraw(parcel)
            await ship.gate.shut()
            raise

    async def _destination(self, address: str) -> Destination:
        if address not in self._destinations:
            endpoint = await resolve(address)
            if address not in self._destinations:
                self._destinations[address] = Destination(
                    address, endpoint, self._turns, self._links, self._config, self._forget_destination
                )
        return self._destinations[address]

    def _forget_destination(self, destination: Destination) -> None:
        if self._destinations.get(destination.address) is destination:
            del self._destinations[destination.address]

    async def abort(self, ticket: bytes) -> None:
        """See :meth:`Sender.abort`."""
        await self._book.abort(ticket)

    async def close(self) -> None:
        """See :meth:`Sender.close`."""
        await self._book.close()
        threads, self._threads = self._threads, []
        for thread in threads:
            await thread.stop()
        self._links.close()
        self._memory = memoryview(b"")
