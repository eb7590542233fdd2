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
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.block_slots import Array, Search, Values
from router.block_table import BlockTable

FEW = 16
"""Workers up to which bits are taken one by one."""


class Move(NamedTuple):
    """Blocks that a worker has from now on, or has no more."""

    row: int
    keys: Array
    stored: bool


class BlockIndex:
    """Blocks by key, and the rows of the workers that have them.

    Args:
        search: by which keys are found; the best there is by default.

    Attributes:
        blocks: different ones that somebody has.
        holdings: pairs of a block and a worker that has it.
    """

    def __init__(self, search: Search | None = None) -> None:
        self.blocks = self.holdings = 0
        self._table = BlockTable(self._worth, search)
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
        self.change([Move(row, keys, stored=True)])

    def remove(self, row: int, keys: Array) -> None:
        """The worker of ``row`` has these blocks no more."""
        self.change([Move(row, keys, stored=False)])

    def change(self, moves: Sequence[Move]) -> None:
        """Blocks come and go, in that order; many at once cost each of them less."""
        keys = np.concatenate([move.keys for move in moves])
        if not keys.all():
            keys = np.maximum(keys, 1)
        of = np.repeat(np.arange(len(moves)), [len(move.keys) for move in moves])
        # First: what it drops is counted down, and must not have been looked up before.
        self._table.make_room(len(keys), self.blocks)
        while keys.size:
            again = _named_again(keys)
            if not again.size:
                self._change(keys, of, moves)
                return
            # One that is named several times has its turns one after the other.
            first = np.ones(len(keys), dtype=bool)
            first[again] = False
            self._change(keys[first], of[first], moves)
            keys, of = keys[again], of[again]

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
            whole = depth + len(keys)
            for number, blocks in self._table.lead(keys):
                if number != last:
                    last = number
                    still = staying & members[number]
                    if still != staying:
                        if depth:
                            found.append((staying ^ still, depth))
                        staying = still
                        if not staying:
                            return found
                depth += blocks
            if depth < whole:
                break
        if depth:
            found.append((staying, depth))
        return found

    def _change(self, keys: Array, of: NDArray[np.int64], moves: Sequence[Move]) -> None:
        where = self._table.locate(keys)
        numbers = where.values
        # Blocks that follow each other mostly are the same workers': a run of them is one step.
        turns = np.flatnonzero((numbers[1:] != numbers[:-1]) | (of[1:] != of[:-1]))
        ends = [*(turns + 1).tolist(), len(keys)]
        after, start = [], 0
        for end, number, index in zip(ends, numbers[[*turns, -1]].tolist(), of[[*turns, -1]].tolist(), strict=True):
            move, count = moves[index], end - start
            members = self._members[number]
            wanted = members | 1 << move.row if move.stored else members & ~(1 << move.row)
            target = self._number(wanted)
            after.append(target)
            self.holdings += count * (wanted.bit_count() - members.bit_count())
            self.blocks += count * (bool(wanted) - bool(members))
            self._count(target, count)
            self._count(number, -count)
            start = end
        lengths = np.diff(ends, prepend=0)
        self._table.assign(keys, where, np.repeat(np.array(after, dtype=np.uint32), lengths))

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


def _named_again(keys: Array) -> NDArray[np.int64]:
    """Places of keys that are named before, in order."""
    ordered = np.sort(keys)
    if not (ordered[1:] == ordered[:-1]).any():
        return np.zeros(0, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    return np.sort(order[1:][ordered[1:] == ordered[:-1]])


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
