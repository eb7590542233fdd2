"""Copying from a peer's pool into our own, batch by batch."""

from __future__ import annotations

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


def batches(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """The runs in order, cut so that no batch is longer than BATCH_BYTES."""
    batch: list[Run] = []
    room = BATCH_BYTES
    for first_source, first_target, total in runs:
        source, target, left = first_source, first_target, total
        while left:
            size = min(room, left)
            batch.append((source, target, size))
            source, target, left, room = source + size, target + size, left - size, room - size
            if not room:
                yield batch
                batch, room = [], BATCH_BYTES
    if batch:
        yield batch


class Copier:
    """Copies from ``source`` to ``target``; both are kept until :meth:`release`."""

    def __init__(self, source: memoryview, target: memoryview) -> None:
        self._source, self._target = source, target
        self._from: Bytes = np.frombuffer(source, np.uint8)
        self._into: Bytes = np.frombuffer(target, np.uint8)

    def copy(self, batch: Sequence[Run]) -> None:
        """Copy every run."""
        for source, target, nbytes in batch:
            if nbytes < RELEASE_BYTES:
                self._target[target : target + nbytes] = self._source[source : source + nbytes]
            else:
                np.copyto(self._into[target : target + nbytes], self._from[source : source + nbytes])

    def sum(self, batch: Sequence[Run], checksum: Checksum) -> None:
        """Take in what every run was copied to."""
        for _, target, nbytes in batch:
            checksum.update(self._target[target : target + nbytes])

    def release(self) -> None:
        """Let go of both memories."""
        self._from = self._into = np.empty(0, np.uint8)
        self._source = self._target = memoryview(b"")
