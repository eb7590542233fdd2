"""Pools of a benchmark: anonymous shared memory where the system has it, so that every transport can use it."""

from __future__ import annotations

import mmap
import os

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


def make_memory(nbytes: int) -> memoryview:
    """``nbytes`` bytes of zeros, shareable by descriptor where the system can; freed with the last view.

    Raises:
        ConfigError: the system has not so much.
    """
    try:
        if not hasattr(os, "memfd_create"):
            return memoryview(mmap.mmap(-1, nbytes))
        descriptor = os.memfd_create("kvferry-bench", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, nbytes)
            return memoryview(mmap.mmap(descriptor, nbytes))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(f"no memory for a pool of {nbytes >> 20} MiB: {error}", field="max_pool") from error


def fill(memory: memoryview, pattern: bytes) -> None:
    """Write ``pattern`` over all of ``memory``, again and again; every page is then really there."""
    for first in range(0, memory.nbytes, len(pattern)):
        piece = min(len(pattern), memory.nbytes - first)
        memory[first : first + piece] = pattern[:piece]
