"""Where blocks land that cross in another element type than the pool's: a place for each block of the pool.

Life cycle: mapped at construction, without a page; pages come as blocks land and go as they are discarded; the mapping
goes with the object.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence

from engine.repack import unpack
from protocol.wire_layout import WireLayout

_NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""``MAP_NORESERVE``, which Python 3.11 has no name for: what is never touched does not count against the system."""


class LandingMemory:
    """See the module.

    Args:
        pool: bytes of the pool that blocks are for.
        wire: the form in which they land.
        num_blocks: of the pool.
        keep: whether pages stay once they are there: a transport may have pinned them.
    """

    def __init__(self, pool: memoryview, wire: WireLayout, num_blocks: int, *, keep: bool) -> None:
        self._pool = pool
        self._wire = wire
        self._keep = keep
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._mapping = mmap.mmap(-1, num_blocks * wire.block_bytes, flags=flags)
        self.memory = memoryview(self._mapping)

    def unpack(self, blocks: Sequence[int]) -> None:
        """Make the pool's blocks out of what has landed in their places."""
        unpack(self.memory, self._wire, blocks, self._pool)

    def discard(self, blocks: Sequence[int]) -> None:
        """Give the pages back that lie wholly in the places of ``blocks``."""
        if self._keep:
            return
        for first, count in _neighbours(blocks):
            begin = -(-first * self._wire.block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (first + count) * self._wire.block_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            if end > begin:
                self._mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _neighbours(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """``(first, count)`` of each run of adjacent ids."""
    found: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if found and block == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((block, 1))
    return found
