"""Copying from a peer's pool into our own, batch by batch."""

from __future__ import annotations

import ctypes
import logging
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kv_transfer.checksum import Checksum
from protocol.compiling import compiled
from protocol.errors import ConfigError

Run = tuple[int, int, int]
"""``(source, target, nbytes)``."""
Bytes = npt.NDArray[np.uint8]

BATCH_BYTES = 8 << 20
"""Bounds how long a gate and a ledger entry are held, to a millisecond or two, at next to no cost: of batches of 1 MiB
the checks and locks were a fourth of the time."""
SUMMED_BYTES = 1 << 20
"""The same where each batch is summed after it is copied, and had better lie in a cache still."""
RELEASE_BYTES = 128 << 10
"""From here on a copy lets other threads have the interpreter. For a shorter one, taking it back may cost more."""
STREAM_BYTES = 512 << 10
"""From here on a batch is stored past the caches: by then it is more than what its reader would find in one."""
SOURCE = Path(__file__).with_suffix(".c")
_SIGNATURE = (*(ctypes.c_void_p,) * 3, ctypes.c_size_t, ctypes.c_int)

log = logging.getLogger(__name__)


class RunCopies(NamedTuple):
    """``kvf_copy_runs`` of ``copying.c``.

    Attributes:
        holding: keeps the interpreter while it copies.
        letting_go: lets other threads have it meanwhile.
    """

    holding: Callable[[int, int, int, int, int], None]
    letting_go: Callable[[int, int, int, int, int], None]


@cache
def load_copies() -> RunCopies | None:
    """The compiled copies, built when first asked for; None where they cannot be, which is logged once."""
    try:
        path = str(compiled(SOURCE, ("-O3",), owner="shm", label="shm"))
        functions = [kind(path).kvf_copy_runs for kind in (ctypes.PyDLL, ctypes.CDLL)]
    except (ConfigError, OSError, AttributeError) as error:
        log.warning("shared memory is copied run by run, which is slower: %s", error)
        return None
    for function in functions:
        function.argtypes, function.restype = _SIGNATURE, None
    return RunCopies(*functions)


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
    def copy(self, batch: Sequence[Run], *, summed: bool = False) -> None:
        """Copy every run. When this has returned or raised, nothing is read or written for it any more.

        Args:
            batch: of at most ``batch_bytes``.
            summed: :meth:`sum` is next.

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
        self._addresses = self._into.ctypes.data, self._from.ctypes.data
        self._copies = load_copies()

    def copy(self, batch: Sequence[Run], *, summed: bool = False) -> None:
        """See :meth:`Copier.copy`."""
        if self._copies is None:
            self._copy_by_run(batch)
            return
        runs = np.array(batch, np.int64)
        nbytes = int(runs[:, 2].sum())
        copy_runs = self._copies.holding if nbytes < RELEASE_BYTES else self._copies.letting_go
        # What is summed next should lie in a cache.
        past_caches = nbytes >= STREAM_BYTES and not summed
        copy_runs(*self._addresses, runs.ctypes.data, len(batch), past_caches)

    def _copy_by_run(self, batch: Sequence[Run]) -> None:
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
