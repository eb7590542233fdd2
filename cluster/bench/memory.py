"""Pools of a benchmark: anonymous shared memory where the system has it, so that every transport can use it."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import psutil

from protocol.errors import ConfigError

PATTERN_BYTES = (1 << 20) + 7
"""Length of the random pattern that fills a pool; odd, so that blocks differ."""
HEADROOM = 0.9
"""Of the memory that is available, a benchmark takes this share at most."""


def check_room(nbytes: int) -> None:
    """Refuse what this machine's memory cannot hold now.

    Raises:
        ConfigError: it cannot; names both figures.
    """
    available = psutil.virtual_memory().available
    if nbytes > HEADROOM * available:
        raise ConfigError(
            f"the pools take {nbytes >> 20} MiB, this machine has {available >> 20} MiB available: fewer --tokens or "
            f"--concurrency",
            field="tokens",
        )


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool's memory.

    Attributes:
        view: its bytes, zeros at first; freed with the last view of them.
        descriptor: of the sealed anonymous file that they are the whole of; None where the system has none.
    """

    view: memoryview
    descriptor: int | None


@contextmanager
def made_pool(nbytes: int) -> Iterator[Pool]:
    """A pool of ``nbytes`` bytes; its descriptor is open within this context.

    Raises:
        ConfigError: the system has not so much.
    """
    with ExitStack() as stack:
        try:
            descriptor = None
            if hasattr(os, "memfd_create"):
                descriptor = os.memfd_create("kvferry-bench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                stack.callback(os.close, descriptor)
                os.ftruncate(descriptor, nbytes)
                # Whoever maps it is safe from its getting shorter.
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            view = memoryview(mmap.mmap(-1 if descriptor is None else descriptor, nbytes))
        except OSError as error:
            raise ConfigError(f"no memory for a pool of {nbytes >> 20} MiB: {error}", field="max_pool") from error
        yield Pool(view, descriptor)


def fill(memory: memoryview, pattern: bytes) -> None:
    """Write ``pattern`` over all of ``memory``, again and again; every page is then really there."""
    for first in range(0, memory.nbytes, len(pattern)):
        piece = min(len(pattern), memory.nbytes - first)
        memory[first : first + piece] = pattern[:piece]
