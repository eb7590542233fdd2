"""From the keys of blocks to small numbers, for tens of millions of them: open addressing over numpy arrays.

Keys lie in buckets of sixteen, two cache lines each, in the first bucket from their own on that had room; a bucket that
some key has passed sends searches on. A slot with key 0 was never used; one with value 0 is dead, and free for any key.
When unused slots run out a new table is made, and each further call moves a part of the old one there, so that no call
takes long: 12 bytes a slot, at most 38 bytes a key, while both tables are there.

Life cycle of a key: assigned a value other than 0, assigned others, cleared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.uint64]
Values = NDArray[np.uint32]

BUCKET = 16
FIRST_BUCKETS = 64
FEW = 24
"""Keys up to which the rest of a search is quicker one by one."""
FILL = 0.8
"""Share of slots in use at which a new table is made."""
DENSE = 0.55
"""Share of slots with a value over which the new table is larger."""
GROWTH = 1.4
MIX = np.uint64(0x9E3779B97F4A7C15)
"""Spreads keys over the buckets however they are chosen; a product keeps its low 64 bits."""
LOW = (1 << 64) - 1
HALF = np.uint64(32)
"""Bits that are left of a mixed key."""
PACE = 16
"""Slots moved for each key assigned while there are two tables."""


class _Slots:
    """One table; keys are never 0.

    Attributes:
        passed: by bucket, whether a key that belongs there, or further up, went to a later one.
    """

    def __init__(self, buckets: int) -> None:
        self.buckets = buckets
        self.keys: Array = np.zeros((buckets, BUCKET), dtype=np.uint64)
        self.values: Values = np.zeros((buckets, BUCKET), dtype=np.uint32)
        self.passed: NDArray[np.bool_] = np.zeros(buckets, dtype=bool)
        self.flat_keys = self.keys.reshape(-1)
        self.flat_values = self.values.reshape(-1)
        self._view = self.flat_keys.data
        self._count = np.uint64(buckets)
        self.used = 0

    @property
    def size(self) -> int:
        return self.buckets * BUCKET

    def home(self, keys: Array) -> NDArray[np.int64]:
        mixed = keys * MIX
        mixed >>= HALF
        mixed *= self._count
        mixed >>= HALF
        return mixed.view(np.int64)

    def probe(self, key: int) -> int:
        """The value of one key, 0 where it has none."""
        bucket = ((key * int(MIX) & LOW) >> 32) * self.buckets >> 32
        start = bucket * BUCKET
        keys = self._view[start : start + BUCKET].tolist()
        slot = start + keys.index(key) if key in keys else self._further(key, bucket)
        return 0 if slot < 0 else int(self.flat_values[slot])

    def values_of(self, keys: Array) -> Values:
        """What each key has in the bucket it belongs to: its value, or 0 though a later bucket may have it."""
        bucket = self.home(keys)
        hits = self.keys.take(bucket, axis=0) == keys[:, None]
        values = self.values.take(bucket, axis=0)
        found: Values = values[hits]
        return found if found.size == keys.size else (values * hits).max(axis=1)

    def locate(self, keys: Array) -> NDArray[np.int64]:
        """The slot of each key, -1 where there is none."""
        bucket = self.home(keys)
        hits = (self.keys.take(bucket, axis=0) == keys[:, None]).reshape(-1).nonzero()[0]
        slots: NDArray[np.int64] = bucket * BUCKET
        if hits.size == keys.size:
            hits &= BUCKET - 1
            slots += hits
            return slots
        found = hits // BUCKET
        lacking = np.ones(keys.size, dtype=bool)
        lacking[found] = False
        slots[found] += hits % BUCKET
        slots[lacking] = -1
        pending = np.flatnonzero(lacking & self.passed[bucket])
        if pending.size <= FEW:
            for index in pending.tolist():
                slots[index] = self._further(int(keys[index]), int(bucket[index]))
            return slots
        bucket = bucket[pending]
        while pending.size:
            bucket = (bucket + 1) % self.buckets
            hits = np.flatnonzero(self.keys[bucket] == keys[pending, None])
            found = hits // BUCKET
            slots[pending[found]] = bucket[found] * BUCKET + hits % BUCKET
            further = self.passed[bucket]
            further[found] = False
            pending, bucket = pending[further], bucket[further]
        return slots

    def _further(self, key: int, bucket: int) -> int:
        """The slot of a key that is not in the bucket it belongs to, -1 where there is none."""
        while self.passed[bucket]:
            bucket = (bucket + 1) % self.buckets
            keys = self._view[bucket * BUCKET : (bucket + 1) * BUCKET].tolist()
            if key in keys:
                return bucket * BUCKET + keys.index(key)
        return -1

    def insert(self, keys: Array, values: Values) -> None:
        """Put in keys that are not there, each once."""
        bucket = self.home(keys)
        while keys.size:
            slots = (self.values.take(bucket, axis=0) == 0).argmax(axis=1)
            slots += bucket * BUCKET
            room = self.flat_values.take(slots) == 0
            full = np.flatnonzero(~room)
            slots, wanting = slots[room], keys[room]
            unused = self.flat_keys.take(slots) == 0
            # Several may want one slot: who is written last has it, and the others look again.
            self.flat_keys[slots] = wanting
            won = self.flat_keys.take(slots) == wanting
            self.flat_values[slots[won]] = values[room][won]
            self.used += int(np.count_nonzero(unused & won))
            self.passed[bucket[full]] = True
            bucket[full] = (bucket[full] + 1) % self.buckets
            room[room] = won
            left = ~room
            keys, values, bucket = keys[left], values[left], bucket[left]


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
    """

    def __init__(self, worth: Callable[[Values], NDArray[np.bool_]]) -> None:
        self._worth = worth
        self._slots = _Slots(FIRST_BUCKETS)
        self._old: _Slots | None = None
        self._moved = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    @property
    def nbytes(self) -> int:
        """Memory of the tables."""
        tables = [self._slots, *([self._old] if self._old is not None else [])]
        return sum(table.keys.nbytes + table.values.nbytes + table.passed.nbytes for table in tables)

    def locate(self, keys: Array) -> Located:
        """Where keys over 0 are, each named once."""
        slots = self._slots.locate(keys)
        values = self._slots.flat_values.take(slots)
        absent = np.flatnonzero(slots < 0)
        if not absent.size:
            return Located(slots, None, values)
        values[absent] = 0
        if self._old is None:
            return Located(slots, None, values)
        old = np.full_like(slots, -1)
        old[absent] = found = self._old.locate(keys[absent])
        there = found >= 0
        values[absent[there]] = self._old.flat_values[found[there]]
        return Located(slots, old, values)

    def lead(self, keys: Array) -> list[int]:
        """The values of the first keys, up to the first that has none: what a prompt that nobody has costs one look."""
        if not keys.size or not self._probe(int(keys[0])):
            return []
        found: list[int] = self._slots.values_of(keys).tolist()
        place = -1
        for _ in range(found.count(0)):
            place = found.index(0, place + 1)
            found[place] = self._probe(int(keys[place]))
            if not found[place]:
                return found[:place]
        return found

    def _probe(self, key: int) -> int:
        found = self._slots.probe(key)
        return found if found or self._old is None else self._old.probe(key)

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
        self._slots.insert(keys[wanted], values[wanted])

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
        self._old, self._slots, self._moved = self._slots, _Slots(-(-size // BUCKET)), 0

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
        self._slots.insert(old.flat_keys[self._moved : stop][kept], values[kept])
        # Not to be found twice, now that they are in the new table.
        values[:] = 0
        self._moved = stop
        if stop == old.size:
            self._old = None
