"""The pool of a simulated worker, which reckons in runs of blocks, against one that looks at each block."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from cluster.simulation.block_cache import BlockCache, Stay, keys_apart

KEY = 8
POOL = 12
MOVES = st.lists(
    st.tuples(st.sampled_from(["take", "take", "seal", "release", "tell"]), st.integers(0, 7), st.integers(1, 6)),
    max_size=60,
)
CHAINS = [(0, 1, 2, 3, 4, 5), (0, 1, 2, 6, 7, 8), (0, 9, 10, 11, 12, 13), (14, 15, 16, 17, 18, 19)]
"""Prompts that share beginnings, by the numbers of their blocks."""


def named(number: int) -> bytes:
    return (number + 1).to_bytes(KEY, "little")


@dataclass(eq=False)
class BlockByBlock:
    """One stay in the plain pool."""

    found: int
    names: list[bytes] = field(default_factory=list)
    unnamed: int = 0


class PlainPool:
    """The same pool, block by block: what is held counts its holders, what is idle lies in order of last use."""

    def __init__(self, blocks: int) -> None:
        self.total, self.unnamed = blocks, 0
        self.held: dict[bytes, int] = {}
        self.idle: dict[bytes, None] = {}

    def hits(self, keys: list[bytes]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self.held and key not in self.idle), len(keys))

    def take(self, keys: list[bytes], fresh: int) -> BlockByBlock | None:
        wanted = fresh - (self.total - self.unnamed - len(self.held) - len(self.idle))
        if wanted > 0 and wanted > len(self.idle) - sum(key in self.idle for key in keys):
            return None
        for key in keys:
            self.held[key] = self.held.get(key, 0) + 1
            self.idle.pop(key, None)
        for key in list(self.idle)[: max(0, wanted)]:
            del self.idle[key]
        self.unnamed += fresh
        return BlockByBlock(len(keys), list(keys), fresh)

    def seal(self, stay: BlockByBlock, keys: list[bytes]) -> None:
        for key in keys:
            if key not in self.held and key not in self.idle:
                self.held[key] = 1
                stay.names.append(key)
                stay.unnamed -= 1
                self.unnamed -= 1

    def release(self, stay: BlockByBlock) -> None:
        for key in reversed(stay.names):
            self.held[key] -= 1
            if not self.held[key]:
                del self.held[key]
                self.idle[key] = None
        self.unnamed -= stay.unnamed


@given(MOVES)
def test_runs_of_blocks_come_to_what_single_blocks_do(moves: list[tuple[str, int, int]]) -> None:
    """Hits, room, what is evicted first, and what routers are told of it."""
    pool, plain = BlockCache(POOL), PlainPool(POOL)
    waiting: list[tuple[bytes, int, Stay, BlockByBlock]] = []
    sealed: list[tuple[Stay, BlockByBlock]] = []
    known: set[bytes] = set()
    for kind, number, length in moves:
        match kind:
            case "take":
                keys = b"".join(map(named, CHAINS[number % len(CHAINS)]))
                apart = [*keys_apart(keys)]
                found = plain.hits(apart[:length])
                stay, other = pool.take(keys, length, length), plain.take(apart[:found], length - found)
                assert (stay is None) == (other is None)
                assert stay is None or stay.found == found
                if stay is not None and other is not None:
                    waiting.append((keys, length, stay, other))
            case "seal" if waiting:
                keys, length, stay, other = waiting.pop(number % len(waiting))
                pool.seal(stay, keys, stay.found, length)
                plain.seal(other, [*keys_apart(keys)][other.found : length])
                sealed.append((stay, other))
            case "release" if sealed:
                stay, other = sealed.pop(number % len(sealed))
                pool.release(stay)
                plain.release(other)
            case "tell":
                stored, removed = ({*keys_apart(keys)} for keys in pool.changes.take())
                known = (known - removed) | stored
                assert known == {*plain.held, *plain.idle}
        counts = pool.counts
        assert counts.free >= 0
        assert (counts.active, counts.cached) == (plain.unnamed + len(plain.held), len(plain.idle))
        assert {*keys_apart(pool.everything())} == {*plain.held, *plain.idle}
        assert [*keys_apart(b"".join(run.keys for run in reversed(pool.idle)))] == [*reversed(plain.idle)]


def test_what_comes_and_goes_between_two_messages_is_told_as_it_is_in_the_end() -> None:
    pool, keys = BlockCache(4), b"".join(map(named, range(8)))
    first = pool.take(keys, 4, 4)
    assert first is not None
    pool.seal(first, keys, 0, 4)
    pool.release(first)
    others = pool.take(b"".join(map(named, range(10, 18))), 3, 3)
    assert others is not None
    assert pool.changes.take() == (keys[:KEY], b"")
    pool.release(others)
    again = pool.take(keys, 4, 4)
    assert again is not None
    pool.seal(again, keys, 1, 4)
    pool.release(again)
    assert pool.take(b"".join(map(named, range(20, 28))), 2, 2) is not None
    assert pool.changes.take() == (keys[KEY : 2 * KEY], b"")
