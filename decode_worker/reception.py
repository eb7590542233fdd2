"""Where the blocks that prefill workers ship come in: straight into the pool, by landing memory, or either way.

Life cycle: made listening, closed once; the receiver and the memory that it writes go together.
"""

from __future__ import annotations

from functools import partial

from decode_worker.landing_memory import LandingMemory
from engine.copy_queue import CopyQueue
from engine.device_pool import DevicePool
from engine.kv_cache import KVCache
from engine.repack import unpack
from kv_transfer.choice import UNPINNED, Receivers, listen, listen_on_device
from kv_transfer.landing import Landing
from kv_transfer.memory import DeviceMemory
from kv_transfer.transport import ON_DEVICES, Receiver, TransportConfig
from protocol.errors import ConfigError
from protocol.wire_layout import WireLayout

PINNED_BYTES = 8 << 30
"""Longest landing memory that is pinned: all of it then stays in host memory, used or not."""


class Reception:
    """See the module.

    Args:
        cache: the pool.
        queue: orders copies into it, where it is on a device.
        wire: the form in which blocks cross.
        transport: a scheme, or ``auto``.
        host: address that senders on other hosts reach this one at.
        config: of each transport.

    Attributes:
        receiver: tells of blocks that are in the pool.

    Raises:
        ConfigError: the transport cannot be used here.
    """

    def __init__(
        self, cache: KVCache, queue: CopyQueue, wire: WireLayout, transport: str, host: str, config: TransportConfig
    ) -> None:
        self._queue = queue
        self._pinned: memoryview | None = None
        if cache.in_host_memory and wire.as_in_pool:
            self.receiver: Receiver = listen(transport, host, cache.memory(), config)
            return
        device = None if cache.in_host_memory else DevicePool(cache, queue)
        if device is not None and transport in ON_DEVICES:
            if not wire.as_in_pool:
                text = f"transport {transport!r} converts nothing, got wire_dtype {wire.element!r}"
                raise ConfigError(text, field="wire_dtype")
            found = _listen_on_device(device, transport, config)
            if found is None:
                raise ConfigError(
                    f"transport {transport!r} is for CUDA devices, not for this pool's", field="transport"
                )
            self.receiver = found
            return
        into = device.unpack if device is not None else partial(unpack, pool=cache.memory())
        landing = LandingMemory(into, wire, cache.num_blocks, keep=transport not in UNPINNED)
        if device is not None and landing.memory.nbytes <= PINNED_BYTES and queue.pin(landing.memory):
            self._pinned = landing.memory
            landing.keep()
        try:
            inner = listen(transport, host, landing.memory, config)
        except BaseException:
            self._unpin()
            raise
        landed = Landing(inner, landing.unpack, landing.discard)
        direct = _listen_on_device(device, transport, config) if device is not None and wire.as_in_pool else None
        self.receiver = landed if direct is None else Receivers((direct, landed))

    async def close(self) -> None:
        """Close the receiver; not a byte of the pool changes after this. May be called more than once."""
        await self.receiver.close()
        self._unpin()

    def _unpin(self) -> None:
        if self._pinned is not None:
            self._queue.unpin(self._pinned)
            self._pinned = None


def _listen_on_device(pool: DevicePool, transport: str, config: TransportConfig) -> Receiver | None:
    if pool.device_index is None:
        return None
    return listen_on_device(transport, DeviceMemory(pool.data_ptr, pool.nbytes, pool.device_index), config)
