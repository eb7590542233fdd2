"""Where the blocks that prefill workers ship come in: straight into the pool, or by landing memory.

Life cycle: made listening, closed once; the receiver and the memory that it writes go together.
"""

from __future__ import annotations

from functools import partial

from decode_worker.landing_memory import LandingMemory, Unpack
from engine.copy_queue import CopyQueue
from engine.device_pool import DevicePool
from engine.kv_cache import KVCache
from engine.repack import unpack
from kv_transfer.choice import listen
from kv_transfer.landing import Landing
from kv_transfer.transport import Receiver, TransportConfig
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
        landing = LandingMemory(_unpack(cache, queue), wire, cache.num_blocks, keep=transport == "ucx")
        if not cache.in_host_memory and landing.memory.nbytes <= PINNED_BYTES and queue.pin(landing.memory):
            self._pinned = landing.memory
            landing.keep()
        try:
            inner = listen(transport, host, landing.memory, config)
        except BaseException:
            self._unpin()
            raise
        self.receiver = Landing(inner, landing.unpack, landing.discard)

    async def close(self) -> None:
        """Close the receiver; not a byte of the pool changes after this. May be called more than once."""
        await self.receiver.close()
        self._unpin()

    def _unpin(self) -> None:
        if self._pinned is not None:
            self._queue.unpin(self._pinned)
            self._pinned = None


def _unpack(cache: KVCache, queue: CopyQueue) -> Unpack:
    if not cache.in_host_memory:
        return DevicePool(cache, queue).unpack
    return partial(unpack, pool=cache.memory())
