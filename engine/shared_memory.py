"""Host memory that another process may be given: an anonymous file, which ends with its last holder."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from contextlib import suppress

FUTURE_WRITE = 0x10
"""``F_SEAL_FUTURE_WRITE`` of Linux 5.1: mappings made so far may write, later ones may not."""
LARGE_PAGE = 2 << 20
_COLLAPSE = 25
"""``MADV_COLLAPSE`` of Linux 6.1: large pages now, whatever the system's policy for files in memory is."""


def allocate(nbytes: int, name: str = "kvferry-pool") -> tuple[memoryview, int]:
    """Zeroed memory, and the descriptor that it can be shared by; the caller closes it.

    It can be neither shortened nor lengthened, and whoever is given the descriptor can only read. It begins where a
    large page may, and is unmapped with its last view.

    Args:
        nbytes: at least 1.
        name: seen in ``/proc``, and nowhere else.

    Raises:
        OSError: there is not enough memory.
    """
    # A file's pages are not accounted for until they are touched, when it is too late for an error: ask first.
    asked = mmap.mmap(-1, nbytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    place = -(-ctypes.addressof(ctypes.c_char.from_buffer(asked)) // LARGE_PAGE) * LARGE_PAGE
    asked.close()
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        memory = _mapped(descriptor, nbytes, place)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, FUTURE_WRITE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return memory, descriptor


def take_large_pages(memory: memoryview) -> bool:
    """Have what :func:`allocate` gave backed by large pages, as far as it fills them: it is resident then.

    Attention reads blocks here and there; in pages of four KiB each of them costs several page walks, which in a
    virtual machine are of two levels.

    Returns:
        Whether the system did.
    """
    whole = memory.nbytes // LARGE_PAGE * LARGE_PAGE
    if not whole:
        return False
    # Only what has a page already is looked at; the rest of a large one is filled with zeros.
    for first in range(0, whole, LARGE_PAGE):
        memory[first] = 0
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    done: int = ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(whole), _COLLAPSE)
    return done == 0


def _mapped(descriptor: int, nbytes: int, place: int) -> memoryview:
    """The file's bytes, at ``place`` unless somebody else has taken it meanwhile; Python's own mmap cannot be told."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = library.mmap(place, nbytes, access, mmap.MAP_SHARED, descriptor, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    held = (ctypes.c_ubyte * nbytes).from_address(address)
    # Not at exit, when other threads may still be at it.
    weakref.finalize(held, library.munmap, address, nbytes).atexit = False
    library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.MADV_HUGEPAGE)
    return memoryview(held).cast("B")
