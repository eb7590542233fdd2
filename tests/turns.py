"""Whose turn it is among the sessions of a parallel run: a ``serial`` test runs while no ``slow`` one of another does.

Two locks on files. Who wants to run holds the gate until it is in the hall, which heavy tests share and a serial one
has for itself; so one that waits for the hall is passed by nobody.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Wait for a turn, and have it until the context ends.

    Args:
        folder: the run's; its sessions have it in common.
        alone: let nobody else have one meanwhile.
    """
    with _locked(folder / "hall") as hall:
        with _locked(folder / "gate") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(hall, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@contextmanager
def _locked(file: Path) -> Iterator[int]:
    """The file's descriptor, for a lock that ends with the context, also where a child has inherited it."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield descriptor
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
