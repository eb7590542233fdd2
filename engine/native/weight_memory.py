"""Memory for packed weights, in large pages where the system has them.

A step reads all weights once, from end to end. In pages of four KiB that is a page walk every 64 lines, in a virtual
machine of two levels: where other tenants press on the caches, it costs more than the reading.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress

import torch

from engine.shared_memory import LARGE_PAGE

_CHUNK = 32 << 20
_ALIGNMENT = 64


class WeightMemory:
    """Hands out pieces of large mappings, one beside the other; a mapping goes when its last piece does.

    Life cycle: made once, then asked by any thread. What is not handed out is not resident, but for one page.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """[elements] zeros, at an address that is a multiple of a cache line."""
        size = elements * dtype.itemsize
        with self._lock:
            first = -(-self._used // _ALIGNMENT) * _ALIGNMENT
            if first + size > self._chunk.numel():
                fresh = _mapped(max(size, _CHUNK))
                if size > _CHUNK:
                    return fresh[:size].view(dtype)
                self._chunk, first = fresh, 0
            self._used = first + size
            return self._chunk[first : first + size].view(dtype)


def _mapped(size: int) -> torch.Tensor:
    """Zeros that begin where a large page does."""
    memory = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % LARGE_PAGE
    return whole[first : first + size]
