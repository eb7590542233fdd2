"""Memory of a peer, mapped: what is checked first, so that reading it can never fault."""

from __future__ import annotations

import fcntl
import mmap
import os

from protocol.errors import ConfigError, IntegrityMismatch


def check(descriptor: int, nbytes: int) -> None:
    """Raise unless ``descriptor`` is memory of ``nbytes`` that can never become shorter.

    Raises:
        IntegrityMismatch: it is no memfd, not sealed against shrinking, or of another length.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        size = os.fstat(descriptor).st_size
    except OSError as error:
        raise IntegrityMismatch(f"the shared memory is no memfd: {error}") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise IntegrityMismatch("the shared memory is not sealed against shrinking")
    if size != nbytes or not nbytes:
        raise IntegrityMismatch(f"the shared memory has {size} bytes, {nbytes} were announced")


def attach(descriptor: int, nbytes: int, *, writable: bool) -> mmap.mmap:
    """Map it, checked; the descriptor may be closed afterwards.

    Raises:
        IntegrityMismatch: see :func:`check`, or it cannot be mapped.
    """
    check(descriptor, nbytes)
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        return mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, access)
    except OSError as error:
        raise IntegrityMismatch(f"cannot map {nbytes} bytes of shared memory: {error}") from error


def reopen(descriptor: int, *, writable: bool) -> int:
    """A descriptor of the same memory with an open file description of its own.

    Raises:
        ConfigError: the system does not let us.
    """
    try:
        return os.open(f"/proc/self/fd/{descriptor}", (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"cannot reopen shared memory: {error}", field="memory") from error
