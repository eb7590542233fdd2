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
from kv_transfer.choice import (
    AUTO,
    UNPINNED,
    Receivers,
    check_gpudirect,
    do_without_gpudirect,
    listen,
    listen_on_device,
)
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
        device = None if cache.in_host_memory else DevicePool(cache, queue)
        there = None if device is None else _memory_of(device)
        check_gpudirect(transport, there, config)
        if device is None and wire.as_in_pool:
            self.receiver: Receiver = listen(transport, host, cache.memory(), config)
            return
        if transport != AUTO:
            found = _on_device(transport, host, there, wire, config)
            if found is not None:
                self.receiver = found
                return
            if device is not None and transport in ON_DEVICES:
                raise ConfigError(
                    f"transport {transport!r} is for CUDA devices, not for this pool's", field="transport"
                )
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
        # Last: what it takes is given back by closing it, and a constructor that raises closes nothing.
        found = _on_device(transport, host, there, wire, config) if transport == AUTO else None
        self.receiver = landed if found is None else Receivers((found, landed))

    async def close(self) -> None:
        """Close the receiver; not a byte of the pool changes after this. May be called more than once."""
        await self.receiver.close()
        self._unpin()

    def _unpin(self) -> None:
        if self._pinned is not None:
            self._queue.unpin(self._pinned)
            self._pinned = None


def _memory_of(pool: DevicePool) -> DeviceMemory | None:
    """Where transports for devices find the pool; None where none of them knows its device."""
    index = pool.device_index
    return None if index is None else DeviceMemory(pool.data_ptr, pool.nbytes, index)


def _on_device(
    transport: str, host: str, memory: DeviceMemory | None, wire: WireLayout, config: TransportConfig
) -> Receiver | None:
    """A receiver straight into the pool on a device, where the transport has one."""
    if memory is None:
        return None
    if wire.as_in_pool:
        return listen_on_device(transport, host, memory, config)
    if transport in ON_DEVICES:
        text = f"transport {transport!r} converts nothing, got wire_dtype {wire.element!r}"
        raise ConfigError(text, field="wire_dtype")
    if config.gpudirect == "on":
        do_without_gpudirect(f"blocks are converted on their way to wire_dtype {wire.element!r}", config)
    return None
