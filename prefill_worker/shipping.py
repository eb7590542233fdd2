"""The way of a ship's bytes out of the pool: straight from it for a reader of the same layout, else by way of staging.

Life cycle: made, :meth:`Shipping.ship` and :meth:`Shipping.abort` at will, :meth:`Shipping.close` once; one event loop.
Staging memory is taken when the first reader needs it.
"""

from __future__ import annotations

import logging
import mmap

from engine.repack import pack
from engine.shared_memory import allocate
from kv_transfer.band import Band
from kv_transfer.conversion import Conversion
from kv_transfer.instructions import Ship
from kv_transfer.plan import plan
from kv_transfer.senders import Senders
from kv_transfer.staging import Staging
from kv_transfer.transport import ShipReport, TransportConfig
from protocol.errors import EngineFailure, LayoutMismatch
from protocol.layout import KVLayout
from protocol.wire_layout import WireLayout

MAX_TOLD = 256
"""Forms that are remembered as logged; they come from outside."""

logger = logging.getLogger(__name__)


class Shipping:
    """Sends blocks of one pool.

    Args:
        layout: of the pool.
        memory: the pool's bytes.
        descriptor: of the pool's memory where that can be shared.
        config: of the transports.
        staging_bytes: memory in which blocks are made for readers whose blocks have another form.
    """

    def __init__(
        self,
        layout: KVLayout,
        memory: memoryview,
        descriptor: int | None,
        config: TransportConfig,
        staging_bytes: int,
    ) -> None:
        self._layout = layout
        self._memory = memory
        self._shared = descriptor is not None
        self._config = config
        self._staging_bytes = staging_bytes
        self._senders = Senders(memory, config, descriptor)
        self._staging: Staging | None = None
        self._told: set[WireLayout] = set()

    async def ship(self, address: str, order: Ship) -> ShipReport:
        """Carry a ship out; when this has returned or raised, no byte of the pool is read for it any more.

        Raises:
            LayoutMismatch: the reader's blocks cannot be made out of ours; names both values.
            EngineFailure: there is no memory for staging.
            TransferError: as :meth:`kv_transfer.transport.Sender.ship`.
        """
        if order.layout != self._layout or not order.wire.as_in_pool:
            return await self._staged(order.wire).ship(address, order)
        if order.layers is None:
            band, spans = None, plan(self._layout, order.source_blocks, order.layout, order.target_blocks)
        else:
            band = Band.of_layers(self._layout, order.layers)
            spans = band.spans(order.source_blocks, order.target_blocks)
        named = tuple(zip(order.target_blocks, order.generations, strict=True))
        return await self._senders.find(address).ship(address, order.ticket, spans, named, band=band)

    async def abort(self, ticket: bytes) -> None:
        """Stop every ship under ``ticket``; each of them raises."""
        await self._senders.abort(ticket)
        if self._staging is not None:
            await self._staging.abort(ticket)

    async def close(self) -> None:
        """Stop every ship and the transports under them."""
        await self._senders.close()
        if self._staging is not None:
            await self._staging.close()

    def _staged(self, wire: WireLayout) -> Staging:
        fatal = self._layout.geometry_differences(wire.layout)
        if fatal:
            raise LayoutMismatch("layouts here and there cannot be converted: " + "; ".join(fatal))
        if wire not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(wire)
            differing = self._layout.differences(wire.layout)
            logger.info("KV is converted on its way: %s", "; ".join([*differing, f"sent as {wire.element}"]))
        if self._staging is None:
            try:
                memory, descriptor = self._allocate()
            except (OSError, OverflowError) as error:
                raise EngineFailure(f"cannot allocate staging_bytes {self._staging_bytes}: {error}") from error
            self._staging = Staging(self._layout, memoryview(memory), descriptor, self._pack, self._config)
        return self._staging

    def _allocate(self) -> tuple[mmap.mmap, int | None]:
        if self._shared:
            return allocate(self._staging_bytes, "kvferry-staging")
        return mmap.mmap(-1, self._staging_bytes), None

    def _pack(self, conversion: Conversion, target: memoryview) -> None:
        pack(self._memory, conversion.source, conversion.moves, target, conversion.target, conversion.incomplete)
