"""The prefill side of the UCX transport.

Life cycle: made (memory registered, thread running) -> ships come and go, channels are made when first needed and kept
-> closed (channels closed, thread joined, memory let go).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from kv_transfer.band import Band
from kv_transfer.checksum import Checksum, pieces
from kv_transfer.ships import Ship, ShipBook, check_ship
from kv_transfer.span import Span
from kv_transfer.tcp.delivery import split
from kv_transfer.transport import Sender, ShipReport, TransportConfig
from kv_transfer.ucx import wire
from kv_transfer.ucx.address import resolve
from kv_transfer.ucx.delivery import Line, Parcel
from kv_transfer.ucx.destination import Destination
from kv_transfer.ucx.loop_thread import LoopThread
from kv_transfer.ucx.pool import Pool
from kv_transfer.windows import Part
from protocol.errors import ChannelLost, ConfigError, TransferError

Cut = list[tuple[Part, list[tuple[int, int]]]]


class UcxSender(Sender):
    """See :class:`~kv_transfer.transport.Sender`.

    Args:
        pool: what is read; closed at the end, or where this raises.
        config: streams is the number of channels per receiver.

    Raises:
        ConfigError: there is no UCX, or none for this memory.
    """

    def __init__(self, pool: Pool, config: TransportConfig) -> None:
        self._pool = pool
        self._config = config
        self._book = ShipBook()
        self._closed = False
        try:
            self._context = pool.context(config.ucx_tls)
        except ConfigError:
            pool.close()
            raise
        self._destinations: dict[str, Destination[Parcel]] = {}
        self._thread = LoopThread("kv-ucx-send")
        self._thread.post(pool.enter)

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
            block_bytes = check_ship(spans, generations, self._pool.nbytes, band)
            if spans:
                # One part where it can be: the receiver's one thread gains nothing from several.
                await self._deliver(ship, address, split(ship.number, spans, generations, block_bytes, 1))
        finally:
            self._book.finish(ship)
        return ShipReport(sum(span.nbytes for span in spans), len(spans), time.monotonic() - started)

    async def _deliver(self, ship: Ship, address: str, parts: Cut) -> None:
        entered = ship.gate.enter()
        assert entered, "a ship that has just begun is not stopped"
        parcels: list[Parcel] = []
        future = asyncio.wrap_future(self._thread.submit(self._send(ship, address, parts, parcels)))
        ship.on_stop(lambda error: self._thread.post(partial(_stop, parcels, error)))
        try:
            await _seen_through(future, ship)
        finally:
            failure = future.exception()
            ship.gate.leave()
        ship.check()
        if failure is not None:
            raise failure

    async def _send(self, ship: Ship, address: str, parts: Cut, parcels: list[Parcel]) -> None:
        summed = self._config.checksum
        parcels += [
            Parcel(
                wire.pack_part(ship.ticket, part, summed=summed),
                part,
                [(self._pool.address + offset, nbytes) for offset, nbytes in sources],
            )
            for part, sources in parts
        ]
        if summed:
            for parcel, (_, sources) in zip(parcels, parts, strict=True):
                parcel.frame += await self._sum(ship, parcel.frame, sources)
        # Stopped before there was anything to stop.
        ship.check()
        destination = await self._destination(address)
        ends = await asyncio.gather(*[destination.send(parcel) for parcel in parcels], return_exceptions=True)
        for end in ends:
            if end is not None:
                raise end

    async def _sum(self, ship: Ship, frame: bytes, sources: Sequence[tuple[int, int]]) -> bytes:
        checksum = Checksum(frame)
        for piece in pieces(self._pool.views(sources)):
            ship.check()
            checksum.update(piece)
            # Other channels are driven from this loop, too.
            await asyncio.sleep(0)
        return checksum.digest()

    async def _destination(self, address: str) -> Destination[Parcel]:
        if address not in self._destinations:
            endpoint = await resolve(address)
            self._destinations.setdefault(
                address,
                Destination(address, self._config, lambda: Line.open(endpoint, self._context, self._config)),
            )
        return self._destinations[address]

    async def abort(self, ticket: bytes) -> None:
        """See :meth:`Sender.abort`."""
        await self._book.abort(ticket)

    async def close(self) -> None:
        """See :meth:`Sender.close`."""
        await self._book.close()
        if self._closed:
            return
        self._closed = True
        await self._thread.stop(self._close_lines())
        self._pool.close(self._context)

    async def _close_lines(self) -> None:
        for destination in self._destinations.values():
            await destination.close()


async def _seen_through(future: asyncio.Future[None], ship: Ship) -> None:
    """Wait for ``future``, whatever it ends with; a cancel stops the ship and is passed on after that."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            cancelled = True
            ship.stop(ChannelLost("the ship was cancelled"))
    if cancelled:
        raise asyncio.CancelledError


def _stop(parcels: Sequence[Parcel], error: TransferError) -> None:
    for parcel in parcels:
        parcel.stop(error)
