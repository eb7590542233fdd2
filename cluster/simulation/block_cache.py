"""A worker's pool and prefix cache, in numbers: what is held, what is cached, and what has to go for it.

Life cycle of a block here: taken without a name, sealed under its key when it is full, idle when nobody holds it any
more, and evicted, the one that was used longest ago first. Later blocks of a prompt are let go before earlier ones, so
what is cached of a prompt always begins with its first block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from engine.prefix_changes import PrefixChanges
from protocol.messages import PoolCounts


class BlockCache:
    """One pool.

    Args:
        blocks: of it.

    Attributes:
        changes: of what a prompt finds here.
    """

    def __init__(self, blocks: int) -> None:
        self.changes = PrefixChanges()
        self._total = blocks
        self._unnamed = 0
        self._held: dict[bytes, int] = {}
        self._idle: dict[bytes, None] = {}

    @property
    def counts(self) -> PoolCounts:
        """As a heartbeat has them."""
        active = self._unnamed + len(self._held)
        return PoolCounts(
            free=self._total - active - len(self._idle),
            active=active,
            cached=len(self._idle),
            exported=0,
            importing=0,
            draining=0,
            reserved=0,
            total=self._total,
        )

    def everything(self) -> Iterable[bytes]:
        """All keys that a prompt finds."""
        return [*self._held, *self._idle]

    def hits(self, keys: Sequence[bytes]) -> int:
        """How many of a prompt's first blocks are here."""
        held, idle = self._held, self._idle
        for count, key in enumerate(keys):
            if key not in idle and key not in held:
                return count
        return len(keys)

    def take(self, found: Sequence[bytes], fresh: int) -> bool:
        """Hold the blocks of ``found``, which are here, and ``fresh`` more without names; False if there is no room."""
        held, idle = self._held, self._idle
        free = self._total - self._unnamed - len(held) - len(idle)
        wanted = fresh - free
        if wanted > 0 and wanted > len(idle) - sum(key in idle for key in found):
            return False
        for key in found:
            count = held.get(key)
            if count is None:
                del idle[key]
                held[key] = 1
            else:
                held[key] = count + 1
        if wanted > 0:
            for key in list(islice(idle, wanted)):
                del idle[key]
                self.changes.removed(key)
        self._unnamed += fresh
        return True

    def seal(self, keys: Sequence[bytes]) -> list[bytes]:
        """Name blocks that were taken; returns the names that they have got: some may be another's already."""
        held, idle, stored = self._held, self._idle, self.changes.stored
        named = []
        for key in keys:
            if key in held or key in idle:
                continue
            held[key] = 1
            stored(key)
            named.append(key)
        self._unnamed -= len(named)
        return named

    def release(self, keys: Sequence[bytes], unnamed: int) -> None:
        """Let go of named blocks, in a prompt's order, and of unnamed ones."""
        held, idle = self._held, self._idle
        for key in reversed(keys):
            count = held[key]
            if count > 1:
                held[key] = count - 1
            else:
                del held[key]
                idle[key] = None
        self._unnamed -= unnamed
