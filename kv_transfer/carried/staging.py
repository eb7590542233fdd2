"""The memory that a worker shares with its carrier: a few slots, each as long as the longest chunk.

Life cycle of a staging: made by a worker -> attached by its carrier -> given up by both; it has no name, and ends with
its last holder.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from kv_transfer.checksum import Checksum

T = TypeVar("T")

SLOTS = 4
"""Enough to gather one, move one and scatter one at the same time."""
SLOT_BYTES = 4 << 20
INLINE_BYTES = 256 << 10
"""Longest chunk that the event loop copies itself: to have another thread do it costs more."""
TOTAL_BYTES = SLOTS * SLOT_BYTES

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Piece = tuple[int, int]
"""``(offset, nbytes)`` in a pool."""


class Staging:
    """See the module.

    Args:
        descriptor: of a staging that another process has made; None makes one.

    Attributes:
        descriptor: to be shared; the caller of :meth:`close` still has the mapping.

    Raises:
        OSError: there is not enough memory.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            self.descriptor = os.memfd_create("kvferry-carrier", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, TOTAL_BYTES)
        else:
            self.descriptor = descriptor
        self.bytes: Bytes = np.frombuffer(mmap.mmap(self.descriptor, TOTAL_BYTES), np.uint8)

    def slot(self, index: int, nbytes: int) -> Bytes:
        """The first bytes of a slot."""
        begin = index * SLOT_BYTES
        return self.bytes[begin : begin + nbytes]

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)


class Copies:
    """Where copies are made: in a thread, but for short ones.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)

    async def make(self, nbytes: int, copy: Callable[[], T]) -> T:
        """Run ``copy``, which copies ``nbytes``."""
        if nbytes <= INLINE_BYTES:
            return copy()
        return await asyncio.get_running_loop().run_in_executor(self._thread, copy)

    def close(self) -> None:
        """End the thread; nothing is to be copied any more."""
        self._thread.shutdown()


def cut(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """The same bytes in the same order, as lists that fill a slot each, but for the last."""
    filling: list[Piece] = []
    room = SLOT_BYTES
    for start, length in pieces:
        offset, left = start, length
        while left:
            taken = min(room, left)
            filling.append((offset, taken))
            offset, left, room = offset + taken, left - taken, room - taken
            if not room:
                yield filling
                filling, room = [], SLOT_BYTES
    if filling:
        yield filling


class Sums:
    """Checksums of a part's chunks, one after the other; either end reckons them from its own pool.

    Args:
        announcement: of the part.
    """

    def __init__(self, announcement: bytes) -> None:
        self._first = Checksum(announcement).digest()
        self._count = 0

    def next(self) -> Checksum:
        """That of the next chunk, which has taken in all but the bytes."""
        self._count += 1
        return Checksum(self._first + self._count.to_bytes(8))


def take_in(checksum: Checksum, pool: Bytes, pieces: Sequence[Piece]) -> bytes:
    """The checksum with the pieces of a pool."""
    for offset, nbytes in pieces:
        checksum.update(pool.data[offset : offset + nbytes])
    return checksum.digest()


def gather(pool: Bytes, pieces: Sequence[Piece], slot: Bytes) -> None:
    """Copy the pieces of a pool into a slot, one after the other."""
    at = 0
    for offset, nbytes in pieces:
        slot[at : at + nbytes] = pool[offset : offset + nbytes]
        at += nbytes


def scatter(slot: Bytes, pool: Bytes, pieces: Sequence[Piece]) -> None:
    """Copy a slot to the pieces of a pool, one after the other."""
    at = 0
    for offset, nbytes in pieces:
        pool[offset : offset + nbytes] = slot[at : at + nbytes]
        at += nbytes
