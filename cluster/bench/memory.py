"""Pools of a benchmark: memory such as an engine's pool where the system has it, so that every transport can use it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from engine.shared_memory import allocate, take_large_pages
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
    """A pool of ``nbytes`` bytes, in large pages where the system gives them; its descriptor is open in this context.

    Raises:
        ConfigError: the system has not so much.
    """
    descriptor = None
    try:
        if hasattr(os, "memfd_create"):
            view, descriptor = allocate(nbytes, "kvferry-bench")
            take_large_pages(view)
        else:
            view = memoryview(mmap.mmap(-1, nbytes))
    except OSError as error:
        raise ConfigError(f"no memory for a pool of {nbytes >> 20} MiB: {error}", field="max_pool") from error
    try:
        yield Pool(view, descriptor)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def fill(memory: memoryview, pattern: bytes) -> None:
    """Write ``pattern`` over all of ``memory``, again and again; every page is then really there."""
    for first in range(0, memory.nbytes, len(pattern)):
        piece = min(len(pattern), memory.nbytes - first)
        memory[first : first + piece] = pattern[:piece]
