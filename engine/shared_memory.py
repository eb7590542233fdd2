"""Host memory that another process may be given: an anonymous file, which ends with its last holder."""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress

FUTURE_WRITE = 0x10
"""``F_SEAL_FUTURE_WRITE`` of Linux 5.1: mappings made so far may write, later ones may not."""


def allocate(nbytes: int, name: str = "kvferry-pool") -> tuple[mmap.mmap, int]:
    """Zeroed memory, and the descriptor that it can be shared by; the caller closes it.

    It can be neither shortened nor lengthened, and whoever is given the descriptor can only read.

    Args:
        nbytes: at least 1.
        name: seen in ``/proc``, and nowhere else.

    Raises:
        OSError: there is not enough memory.
    """
    # A file's pages are not accounted for until they are touched, when it is too late for an error: ask first.
    mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        memory = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED)
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, FUTURE_WRITE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return memory, descriptor
