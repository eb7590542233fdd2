from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.block_pool import BlockPool, HolderKind, Owner
from engine.prefix_changes import PrefixChanges


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40), st.sets(st.integers(0, 5)))
def test_changes_are_net(moves: list[tuple[int, bool]], before: set[int]) -> None:
    changes, now = PrefixChanges(), set(before)
    for number, store in moves:
        name = bytes([number])
        if store and number not in now:
            now.add(number)
            changes.stored(name)
        elif not store and number in now:
            now.remove(number)
            changes.removed(name)
    stored, removed = changes.take()
    assert {name[0] for name in stored} == now - before
    assert {name[0] for name in removed} == before - now
    assert changes.take() == ([], [])


def test_a_pool_tells_what_can_be_found_in_it() -> None:
    pool = BlockPool(4, 2)
    known: set[bytes] = set()
    table = Owner(HolderKind.TABLE, "a")
    (first,) = pool.allocate(table, 1)
    pool.seal(first, b"early")
    changes = pool.index.watch()
    for turn in range(6):
        blocks = pool.allocate(table, 2)
        for place, block in enumerate(blocks):
            pool.seal(block, bytes([turn, place]))
        pool.release(table, blocks)
        stored, removed = changes.take()
        known = (known | {*stored}) - {*removed}
        assert known == {*pool.index.hashes()}
