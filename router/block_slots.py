"""One table of keys and numbers over 0, by open addressing, and how it is searched.

Keys lie in buckets of sixteen slots, two cache lines each, in the first bucket from their own on that had room; a
bucket that some key has passed sends searches on. A slot with key 0 was never used; one with value 0 is dead, and free
for any key. Two searches know this form, and each finds what the other has put down.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.uint64]
Values = NDArray[np.uint32]
Run = tuple[int, int]
"""A value, and how many keys in a row have it."""

BUCKET = 16
FEW = 24
"""Keys up to which the rest of a search is quicker one by one."""
MIX = np.uint64(0x9E3779B97F4A7C15)
"""Spreads keys over the buckets however they are chosen; a product keeps its low 64 bits."""
LOW = (1 << 64) - 1
HALF = np.uint64(32)
"""Bits that are left of a mixed key."""


class Slots:
    """One table; keys are never 0.

    Args:
        buckets: of it.

    Attributes:
        passed: by bucket, whether a key that belongs there, or further up, went to a later one.
        used: slots that have or had a key.
        address: of what other code finds the table by: three addresses, and the number of buckets.
    """

    def __init__(self, buckets: int) -> None:
        self.buckets = buckets
        self.keys: Array = np.zeros((buckets, BUCKET), dtype=np.uint64)
        self.values: Values = np.zeros((buckets, BUCKET), dtype=np.uint32)
        self.passed: NDArray[np.bool_] = np.zeros(buckets, dtype=bool)
        self.flat_keys = self.keys.reshape(-1)
        self.flat_values = self.values.reshape(-1)
        self.used = 0
        parts = (self.keys, self.values, self.passed)
        self._described = np.array([*(part.ctypes.data for part in parts), buckets], dtype=np.uint64)
        self.address = int(self._described.ctypes.data)
        self._count = np.uint64(buckets)

    @property
    def size(self) -> int:
        """Slots of it."""
        return self.buckets * BUCKET

    @property
    def nbytes(self) -> int:
        """Memory of it."""
        return self.keys.nbytes + self.values.nbytes + self.passed.nbytes

    def homes(self, keys: Array) -> NDArray[np.int64]:
        """The bucket that each key belongs to."""
        mixed = keys * MIX
        mixed >>= HALF
        mixed *= self._count
        mixed >>= HALF
        return mixed.view(np.int64)

    def home(self, key: int) -> int:
        """The same of one."""
        return ((key * int(MIX) & LOW) >> 32) * self.buckets >> 32


class Search(Protocol):
    """Finds keys in slots, and puts them there."""

    def locate(self, slots: Slots, keys: Array) -> NDArray[np.int64]:
        """The slot of each key, -1 where there is none."""

    def lead(self, slots: Slots, old: Slots | None, keys: Array) -> Iterable[Run]:
        """The values of the first keys, up to the first that has none in either table."""

    def insert(self, slots: Slots, keys: Array, values: Values) -> int:
        """Put in keys that are not there, each once, and no more than there is room for.

        Returns:
            How many slots of those were never used before.
        """


class ArraySearch:
    """Implements :class:`Search` in numpy's operations over all keys at once."""

    def locate(self, slots: Slots, keys: Array) -> NDArray[np.int64]:
        """See :meth:`Search.locate`."""
        bucket = slots.homes(keys)
        hits = (slots.keys.take(bucket, axis=0) == keys[:, None]).reshape(-1).nonzero()[0]
        found: NDArray[np.int64] = bucket * BUCKET
        if hits.size == keys.size:
            hits &= BUCKET - 1
            found += hits
            return found
        there = hits // BUCKET
        lacking = np.ones(keys.size, dtype=bool)
        lacking[there] = False
        found[there] += hits % BUCKET
        found[lacking] = -1
        pending = np.flatnonzero(lacking & slots.passed[bucket])
        if pending.size <= FEW:
            for index in pending.tolist():
                found[index] = _further(slots, int(keys[index]), int(bucket[index]))
            return found
        bucket = bucket[pending]
        while pending.size:
            bucket = (bucket + 1) % slots.buckets
            hits = np.flatnonzero(slots.keys[bucket] == keys[pending, None])
            there = hits // BUCKET
            found[pending[there]] = bucket[there] * BUCKET + hits % BUCKET
            further = slots.passed[bucket]
            further[there] = False
            pending, bucket = pending[further], bucket[further]
        return found

    def lead(self, slots: Slots, old: Slots | None, keys: Array) -> Iterable[Run]:
        """See :meth:`Search.lead`; what a prompt that nobody has costs is one look."""
        if not keys.size or not _value_of(slots, old, int(keys[0])):
            return ()
        found: list[int] = _values_at_home(slots, keys).tolist()
        place = -1
        for _ in range(found.count(0)):
            place = found.index(0, place + 1)
            found[place] = _value_of(slots, old, int(keys[place]))
            if not found[place]:
                del found[place:]
                break
        # Blocks that follow each other mostly are the same workers'.
        alike = found.count(found[0]) == len(found)
        return ((found[0], len(found)),) if alike else zip(found, repeat(1))

    def insert(self, slots: Slots, keys: Array, values: Values) -> int:
        """See :meth:`Search.insert`."""
        fresh, bucket = 0, slots.homes(keys)
        while keys.size:
            chosen = (slots.values.take(bucket, axis=0) == 0).argmax(axis=1)
            chosen += bucket * BUCKET
            room = slots.flat_values.take(chosen) == 0
            full = np.flatnonzero(~room)
            chosen, wanting = chosen[room], keys[room]
            unused = slots.flat_keys.take(chosen) == 0
            # Several may want one slot: who is written last has it, and the others look again.
            slots.flat_keys[chosen] = wanting
            won = slots.flat_keys.take(chosen) == wanting
            slots.flat_values[chosen[won]] = values[room][won]
            fresh += int(np.count_nonzero(unused & won))
            slots.passed[bucket[full]] = True
            bucket[full] = (bucket[full] + 1) % slots.buckets
            room[room] = won
            left = ~room
            keys, values, bucket = keys[left], values[left], bucket[left]
        return fresh


def _values_at_home(slots: Slots, keys: Array) -> Values:
    """What each key has in the bucket it belongs to: its value, or 0 though a later bucket may have it."""
    bucket = slots.homes(keys)
    hits = slots.keys.take(bucket, axis=0) == keys[:, None]
    values = slots.values.take(bucket, axis=0)
    found: Values = values[hits]
    return found if found.size == keys.size else (values * hits).max(axis=1)


def _value_of(slots: Slots, old: Slots | None, key: int) -> int:
    """The value of one key, 0 where it has none."""
    bucket = slots.home(key)
    keys: list[int] = slots.keys[bucket].tolist()
    slot = bucket * BUCKET + keys.index(key) if key in keys else _further(slots, key, bucket)
    found = 0 if slot < 0 else int(slots.flat_values[slot])
    return found if found or old is None else _value_of(old, None, key)


def _further(slots: Slots, key: int, bucket: int) -> int:
    """The slot of a key that is not in the bucket it belongs to, -1 where there is none."""
    while slots.passed[bucket]:
        bucket = (bucket + 1) % slots.buckets
        keys: list[int] = slots.keys[bucket].tolist()
        if key in keys:
            return bucket * BUCKET + keys.index(key)
    return -1
