"""A pool on a device, as the transports see it: its blocks are packed there and brought to host memory, and back.

Conversions run on the device, and what crosses the bus is what crosses the network. Blocking: call it in a thread of
its own. A pool in host memory will do as well, and is how the tests run it where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from engine.block_runs import block_runs
from engine.copy_queue import CopyQueue
from engine.float8 import as_bytes
from engine.kv_cache import KVCache
from engine.repack import Move, pack_tensors, unpacked
from protocol.wire_layout import WireLayout


class DevicePool:
    """See the module. When a method has returned the bytes are where they belong.

    Args:
        cache: whose blocks they are.
        queue: orders the copies after the steps that use the cache.

    Attributes:
        queue: as given.
    """

    def __init__(self, cache: KVCache, queue: CopyQueue) -> None:
        self.queue = queue
        self._pool = cache.tensor
        self._layout = cache.layout
        self._device = cache.tensor.device

    @property
    def data_ptr(self) -> int:
        """Address of the first byte, on the device."""
        return self._pool.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self._pool.nbytes

    @property
    def device_index(self) -> int | None:
        """Which of this process's CUDA devices has it; None where none has."""
        return self._device.index if self._device.type == "cuda" else None

    def gather(self, blocks: Sequence[int], target: memoryview) -> None:
        """Copy whole blocks as they are, one behind the other.

        Raises:
            EngineFailure: the device has failed.
        """
        with self.queue.ordered():
            index = torch.tensor(blocks, device=self._device)
            found = as_bytes(self._pool).index_select(0, index).view(torch.uint8).view(-1)
            _bytes(target).copy_(found, non_blocking=True)

    def pack(self, moves: Iterable[Move], target: memoryview, wire: WireLayout, incomplete: Sequence[int]) -> None:
        """Make wire blocks; see :func:`engine.repack.pack`.

        Raises:
            EngineFailure: the device has failed.
        """
        with self.queue.ordered():
            made = torch.empty(target.nbytes, dtype=torch.uint8, device=self._device)
            pack_tensors(self._pool.view(-1), self._layout, moves, made, wire, incomplete)
            _bytes(target).copy_(made, non_blocking=True)

    def unpack(self, source: memoryview, wire: WireLayout, blocks: Iterable[int]) -> None:
        """Make pool blocks out of wire blocks; see :func:`engine.repack.unpack`.

        Raises:
            EngineFailure: the device has failed.
        """
        landed = _bytes(source).view(-1, wire.block_bytes)
        with self.queue.ordered():
            for first, count in block_runs(blocks):
                # The copy is queued; its source must not change before the queue is through, and it does not.
                arrived = landed[first : first + count].to(self._device, non_blocking=True)
                self._pool[first : first + count] = unpacked(arrived, wire)


def _bytes(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)
