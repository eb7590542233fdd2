"""Where blocks land that cannot land in the pool itself: they cross in another element type, or it is on a GPU.

There is a place for each block of the pool.

Life cycle: mapped at construction, without a page; pages come as blocks land and go as they are discarded; the mapping
goes with the object.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence

from engine.block_runs import block_runs
from protocol.wire_layout import WireLayout

_NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""``MAP_NORESERVE``, which Python 3.11 has no name for: what is never touched does not count against the system."""

Unpack = Callable[[memoryview, WireLayout, Sequence[int]], None]


class LandingMemory:
    """See the module.

    Args:
        unpack: makes pool blocks of these ids out of this memory.
        wire: the form in which they land.
        num_blocks: of the pool.
        keep: whether pages stay once they are there: a transport may have pinned them.
    """

    def __init__(self, unpack: Unpack, wire: WireLayout, num_blocks: int, *, keep: bool) -> None:
        self._unpack = unpack
        self._wire = wire
        self._keep = keep
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._mapping = mmap.mmap(-1, num_blocks * wire.block_bytes, flags=flags)
        self.memory = memoryview(self._mapping)

    def unpack(self, blocks: Sequence[int]) -> None:
        """Make the pool's blocks out of what has landed in their places."""
        self._unpack(self.memory, self._wire, blocks)

    def keep(self) -> None:
        """Keep every page from now on, for it has been pinned."""
        self._keep = True

    def discard(self, blocks: Sequence[int]) -> None:
        """Give the pages back that lie wholly in the places of ``blocks``."""
        if self._keep:
            return
        for first, count in block_runs(blocks):
            begin = -(-first * self._wire.block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (first + count) * self._wire.block_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            if end > begin:
                self._mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)
