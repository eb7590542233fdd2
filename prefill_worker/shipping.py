"""The way of a ship's bytes out of the pool: straight from it for a reader of the same layout, else by way of staging.

From a pool on a GPU blocks go straight to a pool on a GPU of the same host, by a transport for that, and to other hosts
by one that reaches the GPU's memory (GPUDirect). Any others go by staging, whose memory is pinned.

Life cycle: made, :meth:`Shipping.ship` and :meth:`Shipping.abort` at will, :meth:`Shipping.close` once; one event loop.
Staging memory is taken when the first reader needs it.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

from engine.device_pool import DevicePool
from engine.repack import pack
from engine.shared_memory import allocate
from kv_transfer.band import Band
from kv_transfer.choice import AUTO, GPUDIRECT_BY, check_gpudirect, do_without_gpudirect, schemes_of
from kv_transfer.conversion import Conversion
from kv_transfer.instructions import Ship
from kv_transfer.memory import DeviceMemory
from kv_transfer.plan import plan
from kv_transfer.senders import Senders
from kv_transfer.staging import Staging
from kv_transfer.transport import (
    ON_DEVICES,
    SHARED,
    ShipReport,
    TransportConfig,
    scheme_of,
    why_not_on_device,
)
from protocol.errors import ConfigError, EngineFailure, LayoutMismatch
from protocol.layout import KVLayout
from protocol.wire_layout import WireLayout

MAX_TOLD = 256
"""Forms that are remembered as logged; they come from outside."""

logger = logging.getLogger(__name__)


class Shipping:
    """Sends blocks of one pool.

    Args:
        layout: of the pool.
        memory: the pool's bytes, or the pool where it is on a device.
        descriptor: of the pool's memory where that can be shared.
        config: of the transports.
        staging_bytes: memory in which blocks are made that cannot go straight from the pool.
        mode: which transport is used, as :mod:`kv_transfer.choice` names it.

    Attributes:
        unusable: schemes that cannot be used with this pool, and why.

    Raises:
        ConfigError: GPUDirect is to be used in any case, and cannot be.
    """

    def __init__(
        self,
        layout: KVLayout,
        memory: memoryview | DevicePool,
        descriptor: int | None,
        config: TransportConfig,
        staging_bytes: int,
        mode: str = AUTO,
    ) -> None:
        self._layout = layout
        self._config = config
        self._staging_bytes = staging_bytes
        self._device = memory if isinstance(memory, DevicePool) else None
        self._memory = memoryview(b"") if isinstance(memory, DevicePool) else memory
        direct = _direct(memory)
        check_gpudirect(mode, direct, config)
        self._senders = Senders(direct, config, descriptor)
        self._straight: set[str] = set()
        """Schemes by which blocks go from a pool on a device without staging."""
        self.unusable = self._find_unusable(descriptor)
        if isinstance(direct, DeviceMemory) and GPUDIRECT_BY in schemes_of(mode):
            self._reach_by_rdma(direct)
        self._steps = ThreadPoolExecutor(max_workers=1, thread_name_prefix="steps")
        self._staging: Staging | None = None
        self._pinned: memoryview | None = None
        self._told: set[WireLayout] = set()

    def ways(self, order: Ship) -> tuple[str, ...]:
        """The addresses of a ship's reader that it may go to.

        Raises:
            LayoutMismatch: there is none, for blocks would have to be converted on the way; names both values.
        """
        if self._as_they_are(order):
            return order.addresses
        if self._config.gpudirect == "on":
            differing = "; ".join(self._layout.differences(order.layout)) or f"sent as {order.wire.element}"
            raise LayoutMismatch(f"gpudirect is 'on', and by it nothing is converted: {differing}")
        found = tuple(address for address in order.addresses if not _on_device(address))
        if not found:
            differing = "; ".join(self._layout.differences(order.layout)) or f"sent as {order.wire.element}"
            raise LayoutMismatch(f"the decode worker's transports convert nothing: {differing}")
        return found

    async def ship(self, address: str, order: Ship) -> ShipReport:
        """Carry a ship out; when this has returned or raised, no byte of the pool is read for it any more.

        Raises:
            LayoutMismatch: the reader's blocks cannot be made out of ours; names both values.
            EngineFailure: there is no memory for staging, or the device has failed.
            TransferError: as :meth:`kv_transfer.transport.Sender.ship`.
        """
        assert order.layers is None or self._device is None, "blocks on a device are shipped whole"
        straight = self._device is None or scheme_of(address) in self._straight
        if not straight or not self._as_they_are(order):
            return await self._staged(order.wire).ship(address, order)
        if self._device is not None:
            # Another process's copies are in no order with our steps.
            await asyncio.get_running_loop().run_in_executor(self._steps, self._device.queue.wait_for_steps)
        if order.layers is None:
            band, spans = None, plan(self._layout, order.source_blocks, order.layout, order.target_blocks)
        else:
            band = Band.of_layers(self._layout, order.layers)
            spans = band.spans(order.source_blocks, order.target_blocks)
        named = tuple(zip(order.target_blocks, order.generations, strict=True))
        return await self._senders.find(address).ship(address, order.ticket, spans, named, band=band)

    def _find_unusable(self, descriptor: int | None) -> dict[str, str]:
        reasons: dict[str, str] = {}
        can_share = hasattr(os, "memfd_create") if self._device is not None else descriptor is not None
        if not can_share:
            reasons |= dict.fromkeys(SHARED, "the pool is not in shared memory")
        for scheme in ON_DEVICES:
            reasons[scheme] = "the pool is in host memory"
            if self._device is not None and self._device.device_index is not None:
                # Whether it can be shared shows when that is tried, and the worker should know before the first ship.
                try:
                    self._senders.find(f"{scheme}://")
                    del reasons[scheme]
                    self._straight.add(scheme)
                except ConfigError as error:
                    reasons[scheme] = error.message
        return reasons

    def _reach_by_rdma(self, memory: DeviceMemory) -> None:
        reason = why_not_on_device(GPUDIRECT_BY, memory, self._config)
        if reason is None:
            try:
                self._senders.find(f"{GPUDIRECT_BY}://")
                self._straight.add(GPUDIRECT_BY)
                return
            except ConfigError as error:
                reason = error.message
        do_without_gpudirect(reason, self._config)

    def _as_they_are(self, order: Ship) -> bool:
        return order.layout == self._layout and order.wire.as_in_pool

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
        if self._pinned is not None and self._device is not None:
            self._device.queue.unpin(self._pinned)
            self._pinned = None
        self._steps.shutdown(wait=True)

    def _staged(self, wire: WireLayout) -> Staging:
        fatal = self._layout.geometry_differences(wire.layout)
        if fatal:
            raise LayoutMismatch("layouts here and there cannot be converted: " + "; ".join(fatal))
        if (
            (wire.layout != self._layout or not wire.as_in_pool)
            and wire not in self._told
            and len(self._told) < MAX_TOLD
        ):
            self._told.add(wire)
            differing = self._layout.differences(wire.layout)
            logger.info("KV is converted on its way: %s", "; ".join([*differing, f"sent as {wire.element}"]))
        if self._staging is None:
            try:
                view, descriptor = self._allocate()
            except (OSError, OverflowError) as error:
                raise EngineFailure(f"cannot allocate staging_bytes {self._staging_bytes}: {error}") from error
            gather = None
            if self._device is not None:
                self._pinned = view if self._device.queue.pin(view) else None
                gather = self._device.gather
            self._staging = Staging(self._layout, view, descriptor, self._pack, self._config, gather)
        return self._staging

    def _allocate(self) -> tuple[memoryview, int | None]:
        if hasattr(os, "memfd_create"):
            return allocate(self._staging_bytes, "kvferry-staging")
        return memoryview(mmap.mmap(-1, self._staging_bytes)), None

    def _pack(self, conversion: Conversion, target: memoryview) -> None:
        if self._device is not None:
            self._device.pack(conversion.moves, target, conversion.target, conversion.incomplete)
            return
        pack(self._memory, conversion.source, conversion.moves, target, conversion.target, conversion.incomplete)


def _direct(memory: memoryview | DevicePool) -> memoryview | DeviceMemory:
    """What transports read without staging; of a device that none of them knows, nothing."""
    if not isinstance(memory, DevicePool):
        return memory
    index = memory.device_index
    return memoryview(b"") if index is None else DeviceMemory(memory.data_ptr, memory.nbytes, index)


def _on_device(address: str) -> bool:
    return address.partition("://")[0] in ON_DEVICES
