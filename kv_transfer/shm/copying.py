"""Copying from a peer's pool into our own, batch by batch."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kv_transfer.checksum import Checksum

Run = tuple[int, int, int]
"""``(source, target, nbytes)``."""
Bytes = npt.NDArray[np.uint8]

BATCH_BYTES = 1 << 20
"""Bounds how long a gate and a ledger entry are held, at next to no cost: a lock is two system calls."""
RELEASE_BYTES = 128 << 10
"""From here on a copy lets other threads have the interpreter. For a shorter one, taking it back may cost more."""


def batches(runs: Sequence[Run], longest: int) -> Iterator[list[Run]]:
    """The runs in order, cut so that no batch has more than ``longest`` bytes."""
    batch: list[Run] = []
    room = longest
    for first_source, first_target, total in runs:
        source, target, left = first_source, first_target, total
        while left:
            size = min(room, left)
            batch.append((source, target, size))
            source, target, left, room = source + size, target + size, left - size, room - size
            if not room:
                yield batch
                batch, room = [], longest
    if batch:
        yield batch


class Copier(ABC):
    """Copies from a peer's memory into our own. Life cycle: made, used by one thread, released once.

    Attributes:
        nbytes: of the peer's memory.
        batch_bytes: that are copied at a time.
    """

    nbytes: int
    batch_bytes: int

    @abstractmethod
    def copy(self, batch: Sequence[Run]) -> None:
        """Copy every run. When this has returned or raised, nothing is read or written for it any more.

        Raises:
            ChannelLost: not all of it could be copied.
        """

    @abstractmethod
    def sum(self, batch: Sequence[Run], checksum: Checksum) -> None:
        """Take in what every run was copied to."""

    @abstractmethod
    def release(self) -> None:
        """Let go of both memories."""


class HostCopier(Copier):
    """Copies from a mapping to host memory.

    Args:
        source: taken over.
        target: kept until released.
    """

    batch_bytes = BATCH_BYTES

    def __init__(self, source: mmap.mmap, target: memoryview) -> None:
        self._mapping, self._target = source, target
        self._source = memoryview(source)
        self.nbytes = self._source.nbytes
        self._from: Bytes = np.frombuffer(self._source, np.uint8)
        self._into: Bytes = np.frombuffer(target, np.uint8)

    def copy(self, batch: Sequence[Run]) -> None:
        """See :meth:`Copier.copy`."""
        for source, target, nbytes in batch:
            if nbytes < RELEASE_BYTES:
                self._target[target : target + nbytes] = self._source[source : source + nbytes]
            else:
                np.copyto(self._into[target : target + nbytes], self._from[source : source + nbytes])

    def sum(self, batch: Sequence[Run], checksum: Checksum) -> None:
        """See :meth:`Copier.sum`."""
        for _, target, nbytes in batch:
            checksum.update(self._target[target : target + nbytes])

    def release(self) -> None:
        """See :meth:`Copier.release`."""
        self._from = self._into = np.empty(0, np.uint8)
        self._target = memoryview(b"")
        self._source.release()
        self._mapping.close()
