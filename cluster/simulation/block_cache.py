"""A worker's pool and prefix cache, in numbers: what is held, what is cached, and what has to go for it.

Blocks that follow each other in a prompt, and that the same jobs hold, are one *run*; its keys are bytes, one after the
other. So what a job takes and leaves are a few runs, however long its prompt is.

Life cycle of a run here: sealed when its blocks are full, cut in two where a prompt shares its beginning only, idle
when nobody holds it any more, and evicted block by block from its end, the run that was used longest ago first. Later
blocks of a prompt are let go before earlier ones, so what is cached of a prompt always begins with its first block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.simulation.run_changes import RunChanges
from protocol.kv_events import KEY_BYTES
from protocol.messages import PoolCounts


@dataclass(slots=True, eq=False)
class Run:
    """Blocks in a row.

    Attributes:
        keys: of them.
        holders: who holds them.
        flush: number of changes that were taken away before it was sealed.
    """

    keys: bytes
    holders: list[Stay]
    flush: int

    def __len__(self) -> int:
        return len(self.keys) // KEY_BYTES


@dataclass(slots=True, eq=False)
class Stay:
    """What an attempt has of one worker's pool.

    Attributes:
        found: blocks of its prompt that were there when it was let in.
        runs: that it holds, in the order of its prompt.
        unnamed: further blocks that it holds.
    """

    found: int
    runs: list[Run] = field(default_factory=list)
    unnamed: int = 0


class BlockCache:
    """One pool.

    Args:
        blocks: of it.

    Attributes:
        changes: of what a prompt finds here.
        idle: runs that nobody holds, the one that was used longest ago first.
    """

    def __init__(self, blocks: int) -> None:
        self.changes = RunChanges()
        self._total = blocks
        self._unnamed = self._held = self._cached = 0
        self._runs: dict[bytes, Run] = {}
        """By the key of the first block."""
        self.idle: OrderedDict[Run, None] = OrderedDict()

    @property
    def counts(self) -> PoolCounts:
        """As a heartbeat has them."""
        active = self._unnamed + self._held
        return PoolCounts(
            free=self._total - active - self._cached,
            active=active,
            cached=self._cached,
            exported=0,
            importing=0,
            draining=0,
            reserved=0,
            total=self._total,
        )

    def everything(self) -> bytes:
        """All keys that a prompt finds."""
        return b"".join(run.keys for run in self._runs.values())

    def take(self, keys: bytes, full: int, blocks: int) -> Stay | None:
        """Hold so many blocks: those of a prompt's ``full`` ones that are here, and others; None without room."""
        path = self._path(keys, full * KEY_BYTES)
        found = sum(used for _, used in path)
        fresh = blocks - found
        idle = sum(used for run, used in path if not run.holders)
        wanted = fresh - (self._total - self._unnamed - self._held - self._cached)
        if wanted > 0 and wanted > self._cached - idle:
            return None
        runs = [run if used == len(run) else self._cut(run, used) for run, used in path]
        stay = Stay(found, runs, fresh)
        for run in runs:
            if not run.holders:
                del self.idle[run]
            run.holders.append(stay)
        self._held += idle
        self._cached -= idle
        self._unnamed += fresh
        if wanted > 0:
            self._evict(wanted)
        return stay

    def seal(self, stay: Stay, keys: bytes, start: int, stop: int) -> None:
        """Name blocks that were taken, from and to a place in a prompt; what has its name already stays without."""
        at, end, runs = start * KEY_BYTES, stop * KEY_BYTES, self._runs
        while at < end:
            run = runs.get(keys[at : at + KEY_BYTES])
            if run is not None:
                whole = keys.startswith(run.keys, at, end)
                at += (len(run) if whole else _common(run.keys, keys[at:end])) * KEY_BYTES
                continue
            upto = next(
                (place for place in range(at + KEY_BYTES, end, KEY_BYTES) if keys[place : place + KEY_BYTES] in runs),
                end,
            )
            run = Run(keys[at:upto], [stay], self.changes.taken)
            runs[keys[at : at + KEY_BYTES]] = run
            stay.runs.append(run)
            stay.unnamed -= len(run)
            self._unnamed -= len(run)
            self._held += len(run)
            self.changes.stored(run.keys)
            at = upto

    def release(self, stay: Stay) -> None:
        """Let go of all that a stay holds."""
        for run in reversed(stay.runs):
            run.holders.remove(stay)
            if not run.holders:
                self.idle[run] = None
                self._held -= len(run)
                self._cached += len(run)
        self._unnamed -= stay.unnamed
        stay.runs, stay.unnamed = [], 0

    def _path(self, keys: bytes, stop: int) -> list[tuple[Run, int]]:
        """The runs that a prompt begins with, up to a place, and how many of their blocks it has."""
        path, at, runs = [], 0, self._runs
        while at < stop:
            run = runs.get(keys[at : at + KEY_BYTES])
            if run is None:
                break
            whole = keys.startswith(run.keys, at, stop)
            used = len(run) if whole else _common(run.keys, keys[at:stop])
            path.append((run, used))
            at += used * KEY_BYTES
        return path

    def _cut(self, run: Run, blocks: int) -> Run:
        """Make two of a run, for all who hold it; returns the first, of so many blocks."""
        place = blocks * KEY_BYTES
        head = Run(run.keys[:place], run.holders.copy(), run.flush)
        run.keys = run.keys[place:]
        self._runs[head.keys[:KEY_BYTES]] = head
        self._runs[run.keys[:KEY_BYTES]] = run
        for stay in run.holders:
            stay.runs.insert(stay.runs.index(run), head)
        if not run.holders:
            self.idle[head] = None
        return head

    def _evict(self, blocks: int) -> None:
        """Forget so many idle blocks."""
        self._cached -= blocks
        while blocks:
            run = next(iter(self.idle))
            gone = run.keys
            if len(run) > blocks:
                place = (len(run) - blocks) * KEY_BYTES
                run.keys, gone = gone[:place], gone[place:]
            else:
                del self.idle[run]
                del self._runs[gone[:KEY_BYTES]]
            self.changes.removed(gone, recent=run.flush == self.changes.taken)
            blocks -= len(gone) // KEY_BYTES


def _common(one: bytes, other: bytes) -> int:
    """How many keys two rows have in common at their beginnings; a key stands for all before it."""
    least, most = 0, min(len(one), len(other)) // KEY_BYTES
    while least < most:
        middle = (least + most + 1) // 2
        if one[: middle * KEY_BYTES] == other[: middle * KEY_BYTES]:
            least = middle
        else:
            most = middle - 1
    return least


def keys_apart(keys: bytes) -> Iterable[bytes]:
    """Each by itself."""
    return (keys[place : place + KEY_BYTES] for place in range(0, len(keys), KEY_BYTES))
