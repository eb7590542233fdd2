"""Which workers have which blocks in their prefix caches, exactly, for all blocks of a cluster.

A block maps to a *set* of workers, a number; blocks with the same workers share one, and blocks of one conversation
nearly always have the same ones. A set is a bit for each worker, by its *row*. Two blocks whose hashes begin with the
same eight bytes count as one: that happens once in some hundred thousand clusters of ten million blocks, and costs a
prefix hit.

Life cycle of a worker here: blocks are stored and removed in any order, and :meth:`BlockIndex.drop` forgets them all at
once, whereupon its row may be another's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from router.block_table import Array, BlockTable, Values

FEW = 16
"""Workers up to which bits are taken one by one."""


class BlockIndex:
    """Blocks by key, and the rows of the workers that have them.

    Attributes:
        blocks: different ones that somebody has.
        holdings: pairs of a block and a worker that has it.
    """

    def __init__(self) -> None:
        self.blocks = self.holdings = 0
        self._table = BlockTable(self._worth)
        # By number; 0 is the empty set of blocks that nobody has.
        self._members: list[int] = [0]
        self._blocks: list[int] = [0]
        self._numbers: dict[int, int] = {0: 0}
        self._free: list[int] = []

    @property
    def nbytes(self) -> int:
        """Memory, that of the sets included."""
        sets = sum(map(sys.getsizeof, self._members)) + sys.getsizeof(self._numbers)
        lists = sys.getsizeof(self._members) + sys.getsizeof(self._blocks) + sys.getsizeof(self._free)
        return self._table.nbytes + sets + lists

    def store(self, row: int, keys: Array) -> None:
        """The worker of ``row`` has these blocks from now on."""
        self._change(keys, 1 << row, stored=True)

    def remove(self, row: int, keys: Array) -> None:
        """The worker of ``row`` has these blocks no more."""
        self._change(keys, 1 << row, stored=False)

    def drop(self, row: int) -> None:
        """The worker of ``row`` has nothing any more."""
        bit = 1 << row
        for number, members in enumerate(self._members):
            if not members & bit:
                continue
            if self._numbers.get(members) == number:
                del self._numbers[members]
            left = members ^ bit
            self._members[number] = left
            self.holdings -= self._blocks[number]
            if not left:
                self.blocks -= self._blocks[number]
            # Two sets may be equal from now on: only one of them will be given to further blocks.
            self._numbers.setdefault(left, number)

    def depths(self, pieces: Iterable[Array], among: int) -> list[tuple[int, int]]:
        """How many of a prompt's first blocks workers have, without a gap.

        Args:
            pieces: the keys of its blocks, in order, in parts; no further part is asked for than is looked at.
            among: bits of the rows that matter.

        Returns:
            Bits of rows, and how many blocks these have; of those that are in none it is none.
        """
        found: list[tuple[int, int]] = []
        members, staying, depth, last = self._members, among, 0, -1
        for keys in pieces:
            numbers = self._table.lead(keys)
            for number in numbers:
                if number != last:
                    last = number
                    still = staying & members[number]
                    if still != staying:
                        if depth:
                            found.append((staying ^ still, depth))
                        staying = still
                        if not staying:
                            return found
                depth += 1
            if len(numbers) < len(keys):
                break
        if depth:
            found.append((staying, depth))
        return found

    def _change(self, keys: Array, bit: int, *, stored: bool) -> None:
        keys = np.unique(np.maximum(keys, 1))
        if not keys.size:
            return
        # First: what it drops is counted down, and must not have been looked up before.
        self._table.make_room(len(keys), self.blocks)
        numbers = self._table.find(keys)
        kinds, which, counts = np.unique(numbers, return_inverse=True, return_counts=True)
        after = np.empty(len(kinds), dtype=np.uint32)
        for index, (number, count) in enumerate(zip(kinds.tolist(), counts.tolist(), strict=True)):
            members = self._members[number]
            wanted = members | bit if stored else members & ~bit
            target = self._number(wanted)
            after[index] = target
            self.holdings += count * (wanted.bit_count() - members.bit_count())
            self.blocks += count * (bool(wanted) - bool(members))
            self._count(target, count)
            self._count(number, -count)
        changed = (kinds != after)[which]
        self._table.assign(keys[changed], after[which][changed])

    def _number(self, members: int) -> int:
        number = self._numbers.get(members)
        if number is None:
            if self._free:
                number = self._free.pop()
                self._members[number] = members
            else:
                number = len(self._members)
                self._members.append(members)
                self._blocks.append(0)
            self._numbers[members] = number
        return number

    def _count(self, number: int, change: int) -> None:
        if not number:
            return
        self._blocks[number] += change
        if not self._blocks[number] and change < 0:
            members = self._members[number]
            if self._numbers.get(members) == number:
                del self._numbers[members]
            self._members[number] = 0
            self._free.append(number)

    def _worth(self, values: Values) -> NDArray[np.bool_]:
        kinds, which, counts = np.unique(values, return_inverse=True, return_counts=True)
        kept = np.array([bool(self._members[number]) for number in kinds.tolist()], dtype=bool)
        for number, count, keeps in zip(kinds.tolist(), counts.tolist(), kept.tolist(), strict=True):
            if not keeps:
                self._count(number, -count)
        return kept[which] if kinds.size else np.zeros(0, dtype=bool)


def rows_of(bits: int) -> list[int]:
    """The rows whose bits are set, in order."""
    rows = []
    while bits:
        low = bits & -bits
        rows.append(low.bit_length() - 1)
        bits ^= low
    return rows


def mark(out: NDArray[np.float64], bits: int, value: float) -> None:
    """Put a value down for the rows whose bits are set."""
    if bits.bit_count() <= FEW:
        for row in rows_of(bits):
            out[row] = value
        return
    packed = np.frombuffer(bits.to_bytes(-(-len(out) // 8), "little"), dtype=np.uint8)
    out[np.unpackbits(packed, count=len(out), bitorder="little").astype(bool)] = value
