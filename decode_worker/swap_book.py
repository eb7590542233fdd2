"""Which sequences are swapped out, and whose each slot of host memory is. Pure bookkeeping.

Life of a sequence here: it takes slots when it begins to go out, waits once all of it has been copied, is called
back, and gives its slots back when it is in the pool again, or has ended. Slots are kept by a block pool of their own,
so each that is not free has a named owner.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import attrgetter

from decode_worker.sequence import Sequence, table_owner
from engine.block_pool import BlockPool
from protocol.ids import RequestKey


class SwapBook:
    """See the module.

    Args:
        num_slots: of the host memory, slot 0 included, which is never used; below 2 nothing can be swapped out.
    """

    def __init__(self, num_slots: int) -> None:
        self.slots = BlockPool(max(2, num_slots), 1, prefix_cache=False)
        self._usable = max(0, num_slots - 1)
        self._waiting: dict[RequestKey, Sequence] = {}

    @property
    def used(self) -> int:
        """Slots that are somebody's."""
        return self.slots.counts().active

    @property
    def waiting(self) -> Seq[Sequence]:
        """Sequences that are out, in no order."""
        return tuple(self._waiting.values())

    def fits(self, count: int) -> bool:
        """Whether there are so many slots left."""
        return self.used + count <= self._usable

    def senior(self) -> Seq[Sequence]:
        """Who is to come back first, if anyone is out."""
        return sorted(self._waiting.values(), key=attrgetter("order"))[:1]

    def take(self, key: RequestKey, count: int) -> list[int]:
        """Slots for a sequence that begins to go out."""
        return self.slots.allocate(table_owner(key), count)

    def give_back(self, key: RequestKey) -> None:
        """The sequence needs its slots no more."""
        self.slots.release_all(table_owner(key))

    def went_out(self, sequence: Sequence) -> None:
        """All of it has been copied to its slots; it waits."""
        self._waiting[sequence.key] = sequence

    def called_back(self, sequence: Sequence) -> None:
        """It waits no more; its slots stay its own."""
        del self._waiting[sequence.key]

    def overdue(self, before: float) -> list[Sequence]:
        """Sequences that have been out since before then."""
        return [sequence for sequence in self._waiting.values() if sequence.swapped < before]
