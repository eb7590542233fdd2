from __future__ import annotations

import pytest

from engine.block_pool import BlockPool, HolderKind, Owner
from engine.pool_watch import IDLE_BEFORE_CHECK, PoolWatch
from protocol.errors import InvariantViolation


def test_a_pool_is_checked_once_in_each_idle_spell_that_lasts() -> None:
    watch = PoolWatch(BlockPool(4, 4))
    assert not watch.look(busy=False, now=100.0), "it has never been busy"
    assert not watch.look(busy=True, now=101.0)
    assert not watch.look(busy=False, now=101.0 + IDLE_BEFORE_CHECK / 2)
    assert not watch.look(busy=True, now=101.9)
    assert not watch.look(busy=False, now=102.0)
    assert watch.look(busy=False, now=101.9 + IDLE_BEFORE_CHECK)
    assert not watch.look(busy=False, now=200.0)


def test_a_pool_that_does_not_add_up_is_told() -> None:
    pool = BlockPool(4, 4)
    (block,) = pool.allocate(Owner(HolderKind.TABLE, "a"), 1)
    watch = PoolWatch(pool)
    watch.look(busy=True, now=0.0)
    pool._holders[HolderKind.TABLE][block] += 1
    with pytest.raises(InvariantViolation, match=f"block {block}"):
        watch.look(busy=False, now=IDLE_BEFORE_CHECK)
