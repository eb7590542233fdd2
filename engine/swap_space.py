"""Host memory beside the pool, for blocks of sequences that had to make room, and the copies there and back.

Life cycle: made with all its memory, which on the CPU takes up no page before it is written, and on a GPU is pinned;
copies in one thread at a time, not the one of the steps; closed once, when no copy is under way. Which slot and which
block is whose is the caller's business.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from engine.copy_queue import CopyQueue
from engine.kv_cache import KVCache
from protocol.errors import ConfigError

POOLS = 8
"""Times the pool that are kept at most: who waits behind so many is better prefilled anew, and a book of slots is not
free either."""


class SwapSpace:
    """Slots of a block each; slot 0 is never used, as block 0 of a pool is not.

    Args:
        cache: whose blocks they are.
        queue: orders the copies after the steps that use the cache.
        nbytes: of host memory at most.

    Attributes:
        num_slots: slots that fit, slot 0 included.
        block_bytes: of each.

    Raises:
        ConfigError: there is not so much memory.
    """

    def __init__(self, cache: KVCache, queue: CopyQueue, nbytes: int) -> None:
        self.block_bytes = cache.layout.block_bytes
        self.num_slots = min(nbytes // self.block_bytes, POOLS * cache.num_blocks)
        self._queue = queue
        self._blocks = cache.tensor.view(cache.num_blocks, -1).view(torch.uint8)
        try:
            memory = mmap.mmap(-1, max(1, self.num_slots) * self.block_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"swap_bytes {nbytes} cannot be had: {error}", field="swap_bytes") from error
        self._pinned = memoryview(memory) if queue.pin(memoryview(memory)) else None
        self._slots = torch.frombuffer(memory, dtype=torch.uint8).view(-1, self.block_bytes)

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy each block to its slot; when this returns the blocks may be given to others.

        Raises:
            EngineFailure: the device has failed.
        """
        self._copy(self._blocks, blocks, self._slots, slots)

    def restore(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy each slot to its block; when this returns steps may read the blocks.

        Raises:
            EngineFailure: the device has failed.
        """
        self._copy(self._slots, slots, self._blocks, blocks)

    def close(self) -> None:
        """Let go of pinned memory."""
        if self._pinned is not None:
            self._queue.unpin(self._pinned)
            self._pinned = None

    def _copy(self, source: torch.Tensor, rows: Sequence[int], target: torch.Tensor, places: Sequence[int]) -> None:
        with self._queue.ordered():
            for row, place, count in _runs(rows, places):
                here, there = source[row : row + count], target[place : place + count]
                if self._blocks.device.type == "cpu":
                    # Not by torch, whose copies may wait for threads that the steps are using.
                    np.copyto(there.numpy(), here.numpy())
                else:
                    there.copy_(here, non_blocking=True)


def _runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """``(source, target, count)`` of each stretch in which both go up by one."""
    first = 0
    for index in range(1, len(sources) + 1):
        ends = index == len(sources)
        if ends or sources[index] != sources[index - 1] + 1 or targets[index] != targets[index - 1] + 1:
            yield sources[first], targets[first], index - first
            first = index
