"""The search of block slots in C, built once per machine; see ``block_search.c``.

Beside :class:`~router.block_slots.ArraySearch`, which does the same where there is no compiler: a prompt of 64 blocks
takes a tenth of the time, and what workers tell of their blocks a third.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protocol.compiling import compiled
from protocol.errors import ConfigError
from router.block_slots import Array, ArraySearch, Run, Search, Slots, Values

SOURCE = Path(__file__).with_name("block_search.c")
FIRST_KEYS = 1024
"""Keys that there is room for the values of; more of them get more room."""

log = logging.getLogger(__name__)


class NativeSearch:
    """Implements :class:`~router.block_slots.Search`.

    Args:
        library: of ``block_search.c``; it keeps the interpreter.
    """

    def __init__(self, library: ctypes.PyDLL) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._locate, self._lead, self._insert = library.kvf_locate, library.kvf_lead, library.kvf_insert
        self._locate.argtypes, self._locate.restype = (pointer, pointer, size, pointer), None
        self._lead.argtypes, self._lead.restype = (pointer, pointer, pointer, size, pointer), size
        self._insert.argtypes, self._insert.restype = (pointer, pointer, pointer, size), size
        self._pairs: Values = np.empty(2 * FIRST_KEYS, dtype=np.uint32)

    def locate(self, slots: Slots, keys: Array) -> NDArray[np.int64]:
        """See :meth:`Search.locate`."""
        keys = np.ascontiguousarray(keys)
        found = np.empty(keys.size, dtype=np.int64)
        self._locate(slots.address, keys.ctypes.data, keys.size, found.ctypes.data)
        return found

    def lead(self, slots: Slots, old: Slots | None, keys: Array) -> list[Run]:
        """See :meth:`Search.lead`."""
        keys = np.ascontiguousarray(keys)
        if 2 * keys.size > self._pairs.size:
            self._pairs = np.empty(4 * keys.size, dtype=np.uint32)
        before = None if old is None else old.address
        runs = self._lead(slots.address, before, keys.ctypes.data, keys.size, self._pairs.ctypes.data)
        flat: list[int] = self._pairs[: 2 * runs].tolist()
        return list(zip(flat[::2], flat[1::2], strict=True))

    def insert(self, slots: Slots, keys: Array, values: Values) -> int:
        """See :meth:`Search.insert`."""
        keys, values = np.ascontiguousarray(keys), np.ascontiguousarray(values)
        return int(self._insert(slots.address, keys.ctypes.data, values.ctypes.data, keys.size))


def best_search() -> Search:
    """This one where it can be built, else the one of arrays."""
    found = library()
    return ArraySearch() if found is None else NativeSearch(found)


@cache
def library() -> ctypes.PyDLL | None:
    """``block_search.c``, built when first asked for; None where it cannot be, which is logged once."""
    try:
        return ctypes.PyDLL(str(compiled(SOURCE, ("-O3",), owner="the index of blocks", label="index")))
    except (ConfigError, OSError) as error:
        log.warning("blocks are looked up by numpy, which is slower: %s", error)
        return None
