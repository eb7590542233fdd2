"""From the keys of blocks to small numbers, for tens of millions of them: one or two tables of slots.

When unused slots run out a new table is made, and each further call moves a part of the old one there, so that no call
takes long: 12 bytes a slot, at most 38 bytes a key, while both tables are there.

Life cycle of a key: assigned a value other than 0, assigned others, cleared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.block_slots import BUCKET, Array, Run, Search, Slots, Values
from router.native_search import best_search

FIRST_BUCKETS = 64
FILL = 0.8
"""Share of slots in use at which a new table is made."""
DENSE = 0.55
"""Share of slots with a value over which the new table is larger."""
GROWTH = 1.4
PACE = 16
"""Slots moved for each key assigned while there are two tables."""


class Located(NamedTuple):
    """Where some keys are.

    Attributes:
        slots: of each in the table, -1 where it has none.
        old: the same of the old table, where there is one.
        values: of each, 0 where it has none.
    """

    slots: NDArray[np.int64]
    old: NDArray[np.int64] | None
    values: Values


class BlockTable:
    """A map from keys to numbers over 0.

    Args:
        worth: which of some values are to be kept when a table is moved; each of the others is dropped once.
        search: by which slots are found; the best there is by default.
    """

    def __init__(self, worth: Callable[[Values], NDArray[np.bool_]], search: Search | None = None) -> None:
        self._worth = worth
        self._search = search or best_search()
        self._slots = Slots(FIRST_BUCKETS)
        self._old: Slots | None = None
        self._moved = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    @property
    def nbytes(self) -> int:
        """Memory of the tables."""
        return self._slots.nbytes + (0 if self._old is None else self._old.nbytes)

    def locate(self, keys: Array) -> Located:
        """Where keys over 0 are, each named once."""
        slots = self._search.locate(self._slots, keys)
        values = self._slots.flat_values.take(slots)
        absent = np.flatnonzero(slots < 0)
        if not absent.size:
            return Located(slots, None, values)
        values[absent] = 0
        if self._old is None:
            return Located(slots, None, values)
        old = np.full_like(slots, -1)
        old[absent] = found = self._search.locate(self._old, keys[absent])
        there = found >= 0
        values[absent[there]] = self._old.flat_values[found[there]]
        return Located(slots, old, values)

    def lead(self, keys: Array) -> Iterable[Run]:
        """The values of the first keys, up to the first that has none; each, and how many in a row have it."""
        return self._search.lead(self._slots, self._old, keys)

    def assign(self, keys: Array, where: Located, values: Values) -> None:
        """Give located keys new values; 0 clears one. :meth:`make_room` was called for as many before."""
        changed = values != where.values
        keys, slots, values = keys[changed], where.slots[changed], values[changed]
        self._live += int(np.count_nonzero(values)) - int(np.count_nonzero(where.values[changed]))
        here = slots >= 0
        self._slots.flat_values[slots[here]] = values[here]
        if where.old is not None and self._old is not None:
            old = where.old[changed]
            self._old.flat_values[old[old >= 0]] = 0
        wanted = values != 0
        wanted &= ~here
        self._insert(keys[wanted], values[wanted])

    def make_room(self, coming: int, worth: int) -> None:
        """Before ``coming`` keys are assigned: go on moving, and begin with a new table where this one gets full.

        Args:
            coming: keys that are about to be assigned values, at most.
            worth: how many values are to be kept of those there are.
        """
        self._move(PACE * coming)
        needed = self._slots.used + coming
        if needed <= FILL * self._slots.size:
            return
        # Only a call with more keys than a table has slots gets here while an old table is still there.
        self._move(None)
        live = worth + coming
        size = self._slots.size
        if live > DENSE * size:
            size = int(max(GROWTH * size, live / DENSE))
        self._old, self._slots, self._moved = self._slots, Slots(-(-size // BUCKET)), 0

    def _move(self, slots: int | None) -> None:
        """Move the next ``slots`` slots of the old table, or all that are left."""
        old = self._old
        if old is None:
            return
        stop = old.size if slots is None else min(old.size, self._moved + slots)
        values = old.flat_values[self._moved : stop]
        there = np.flatnonzero(values)
        kept = there[self._worth(values[there])]
        self._live -= len(there) - len(kept)
        self._insert(old.flat_keys[self._moved : stop][kept], values[kept])
        # Not to be found twice, now that they are in the new table.
        values[:] = 0
        self._moved = stop
        if stop == old.size:
            self._old = None

    def _insert(self, keys: Array, values: Values) -> None:
        self._slots.used += self._search.insert(self._slots, keys, values)
