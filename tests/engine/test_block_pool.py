"""Each rule of the block pool on its own."""

import pytest

from engine.block_pool import BlockPool, BlockState, HolderKind, Owner
from engine.free_runs import FreeRuns
from engine.prefix_index import block_hashes
from protocol.errors import ConfigError, InvariantViolation, PoolExhausted


def table(key="t"):
    return Owner(HolderKind.TABLE, key)


def lease(key="l"):
    return Owner(HolderKind.LEASE, key)


def importer(key="i"):
    return Owner(HolderKind.IMPORT, key)


def quarantine(key="q"):
    return Owner(HolderKind.QUARANTINE, key)


@pytest.fixture
def pool():
    pool = BlockPool(num_blocks=17, block_size=4)
    yield pool
    pool.check_integrity()
    assert pool.counts().leaked == 0


def sealed(pool, owner, n, seed=0):
    """``n`` blocks of ``owner`` that hold a chain of full blocks, and the chain."""
    chain = block_hashes(range(seed, seed + n * pool.block_size), pool.block_size)
    blocks = pool.allocate(owner, n)
    for block, block_hash in zip(blocks, chain, strict=True):
        pool.seal(block, block_hash)
    return blocks, chain


def refused(pool, call, *args, match):
    """``call`` raises InvariantViolation and changes nothing."""
    before = (pool.counts(), [pool.state(b) for b in range(pool.num_blocks)], dict(pool._holdings))
    with pytest.raises(InvariantViolation, match=match):
        call(*args)
    assert before == (pool.counts(), [pool.state(b) for b in range(pool.num_blocks)], dict(pool._holdings))
    pool.check_integrity()


def test_bad_sizes_are_named():
    with pytest.raises(ConfigError, match=r"num_blocks must be at least 2 .* got 1"):
        BlockPool(1, 16)
    with pytest.raises(ConfigError, match="block_size must be at least 1, got 0"):
        BlockPool(2, 0)


def test_fresh_pool_gives_one_run_and_never_block_0(pool):
    assert pool.allocate(table(), 16) == list(range(1, 17))
    assert pool.state(0) is BlockState.RESERVED
    assert pool.available == 0


def test_exhausted_pool_takes_nothing(pool):
    pool.allocate(table("a"), 10)
    with pytest.raises(PoolExhausted, match="table b wants 7 blocks, 6 of 17 are available"):
        pool.allocate(table("b"), 7)
    assert pool.holdings(table("b")) == []
    assert pool.counts().free == 6


def test_generation_grows_with_each_allocation(pool):
    (block,) = pool.allocate(table(), 1)
    assert pool.generation(block) == 1
    pool.share(lease(), [block])
    pool.release_all(table())
    pool.release_all(lease())
    assert pool.generation(block) == 1
    while block not in pool.allocate(table(), 1):
        pass
    assert pool.generation(block) == 2


def holes(pool, *runs):
    """Everything is taken but the ``runs``, which became free in that order."""
    pool.allocate(table("all"), 16)
    for run in runs:
        pool.release(table("all"), list(run))


def test_a_sequence_grows_next_to_its_last_block(pool):
    assert pool.allocate(table("a"), 2) == [1, 2]
    assert pool.allocate(table("rest"), 14) == list(range(3, 17))
    pool.release(table("rest"), [8, 3, 4, 5])
    # Block 8 alone would be the tighter fit.
    assert pool.allocate(table("a"), 1) == [3]
    assert pool.allocate(table("a"), 3) == [4, 5, 8]


def test_tightest_hole_is_filled_and_the_long_run_kept(pool):
    holes(pool, range(1, 3), range(4, 7), range(8, 17))
    assert pool.allocate(table("c"), 3) == [4, 5, 6]
    assert pool.allocate(table("d"), 2) == [1, 2]
    assert pool.allocate(importer(), 9) == list(range(8, 17))


def test_long_run_is_split_only_when_no_hole_is_long_enough(pool):
    holes(pool, range(1, 4), range(5, 7), range(8, 17))
    assert pool.allocate(table("c"), 4) == [8, 9, 10, 11]


def test_scattered_free_blocks_come_in_the_fewest_runs(pool):
    holes(pool, [2], [4, 5, 6, 7], [9], [11, 12])
    assert pool.allocate(table("new"), 6) == [4, 5, 6, 7, 11, 12]


def test_free_neighbours_grow_together_again():
    free = FreeRuns(1, 9)
    taken = free.take(8)
    for blocks in ([3], [1, 8, 2], [6, 7], [5], [4]):
        free.add(blocks)
        free.check_integrity()
    assert taken == list(range(1, 9))
    assert free.runs() == [(1, 9)]


def test_last_holder_frees_a_block(pool):
    blocks = pool.allocate(table("a"), 3)
    pool.share(table("b"), blocks)
    pool.release(table("a"), blocks)
    assert pool.counts().active == 3
    pool.release_all(table("b"))
    assert pool.counts().free == 16


def test_strongest_holder_gives_the_state(pool):
    blocks, _ = sealed(pool, table("a"), 1)
    pool.share(table("b"), blocks)
    assert pool.state(blocks[0]) is BlockState.ACTIVE
    pool.share(lease("x"), blocks)
    pool.share(lease("y"), blocks)
    assert pool.state(blocks[0]) is BlockState.EXPORTED
    pool.move_all(lease("x"), quarantine("x"))
    assert pool.state(blocks[0]) is BlockState.DRAINING
    pool.release_all(quarantine("x"))
    assert pool.state(blocks[0]) is BlockState.EXPORTED
    pool.release_all(lease("y"))
    pool.release_all(table("a"))
    assert pool.state(blocks[0]) is BlockState.ACTIVE
    pool.release_all(table("b"))
    assert pool.state(blocks[0]) is BlockState.CACHED


def test_released_chain_is_found_and_shared_again(pool):
    blocks, chain = sealed(pool, table("a"), 4)
    pool.release_all(table("a"))
    assert pool.counts().cached == 4
    assert pool.match(chain) == blocks
    pool.share(table("b"), blocks[:2])
    assert (pool.counts().cached, pool.counts().active) == (2, 2)
    # Held blocks are not evicted, whatever is asked for.
    assert len(pool.allocate(table("c"), 14)) == 14
    assert pool.match(chain) == blocks[:2]


def test_oldest_release_is_evicted_first_and_leaves_before_roots(pool):
    old, old_chain = sealed(pool, table("old"), 4, seed=0)
    new, new_chain = sealed(pool, table("new"), 4, seed=1000)
    pool.release_all(table("new"))
    pool.release_all(table("old"))
    pool.share(table("touch"), new)
    pool.release_all(table("touch"))
    pool.allocate(table("x"), 8 + 1)
    assert (pool.match(old_chain), pool.match(new_chain)) == (old[:3], new)
    pool.allocate(table("x"), 2)
    assert (pool.match(old_chain), pool.match(new_chain)) == (old[:1], new)
    pool.allocate(table("x"), 2)
    assert (pool.match(old_chain), pool.match(new_chain)) == ([], new[:3])


def test_match_leaves_the_lru_order_alone(pool):
    first, first_chain = sealed(pool, table("a"), 2, seed=0)
    second, second_chain = sealed(pool, table("b"), 2, seed=1000)
    pool.release_all(table("a"))
    pool.release_all(table("b"))
    assert pool.match(first_chain) == first
    pool.allocate(table("x"), 12 + 2)
    assert (pool.match(first_chain), pool.match(second_chain)) == ([], second)


def test_free_blocks_go_before_cached_ones(pool):
    cached, chain = sealed(pool, table("a"), 4)
    pool.release_all(table("a"))
    assert not set(pool.allocate(table("b"), 12)) & set(cached)
    assert pool.match(chain) == cached
    assert pool.available == 4


def test_first_block_of_a_hash_keeps_it(pool):
    first, chain = sealed(pool, table("a"), 2)
    second, _ = sealed(pool, table("b"), 2)
    assert pool.match(chain) == first
    pool.release_all(table("b"))
    assert {pool.state(b) for b in second} == {BlockState.FREE}
    pool.release_all(table("a"))
    assert {pool.state(b) for b in first} == {BlockState.CACHED}


def test_no_prefix_cache_means_nothing_is_found():
    pool = BlockPool(9, 4, prefix_cache=False)
    _, chain = sealed(pool, table(), 3)
    assert pool.match(chain) == []
    pool.release_all(table())
    assert pool.counts().free == 8
    pool.check_integrity()


def test_import_commits_to_a_table(pool):
    blocks = pool.allocate(importer(), 3)
    assert pool.counts().importing == 3
    assert pool.move_all(importer(), table("t")) == blocks
    assert pool.counts().active == 3
    assert pool.holdings(importer()) == []
    pool.seal(blocks[0], block_hashes(range(4), 4)[0])


def test_a_block_that_a_closed_lease_still_ships_is_sealed_when_it_is_full(pool):
    """The lease took it with its first layers and closed in mid-step; the transport only reads it."""
    (block,) = pool.allocate(table("t"), 1)
    pool.share(lease(), [block])
    pool.move_all(lease(), quarantine())
    (block_hash,) = block_hashes(range(4), 4)
    pool.seal(block, block_hash)
    pool.release_all(table("t"))
    assert pool.counts().draining == 1
    pool.release_all(quarantine())
    assert pool.counts().cached == 1
    assert pool.match([block_hash]) == [block]


def test_import_is_exclusive_until_the_channel_is_quiet(pool):
    blocks = pool.allocate(importer(), 2)
    refused(pool, pool.share, table("thief"), blocks, match="importing block 1 .held by import i.")
    refused(pool, pool.seal, blocks[0], bytes(16), match="importing block 1")
    pool.move_all(importer(), quarantine())
    refused(pool, pool.share, table("thief"), blocks, match="draining block 1 .held by quarantine q.")
    refused(pool, pool.share, lease("thief"), blocks, match="draining block 1")
    refused(pool, pool.seal, blocks[0], bytes(16), match="draining block 1")
    pool.allocate(table("rest"), 14)
    with pytest.raises(PoolExhausted):
        pool.allocate(table("more"), 1)
    assert pool.release_all(quarantine()) == blocks
    assert set(pool.allocate(table("more"), 2)) == set(blocks)


def test_lease_in_quarantine_keeps_the_prefix_usable(pool):
    blocks, chain = sealed(pool, table("a"), 2)
    pool.share(lease(), blocks)
    pool.release_all(table("a"))
    pool.move_all(lease(), quarantine())
    pool.share(table("b"), pool.match(chain))
    pool.release_all(table("b"))
    assert pool.counts().draining == 2
    pool.release_all(quarantine())
    assert pool.counts().cached == 2


def test_hold_again_after_release(pool):
    blocks, _ = sealed(pool, table("a"), 2)
    for _ in range(3):
        pool.release_all(table("a"))
        pool.share(table("a"), blocks)
    assert pool.holdings(table("a")) == blocks


@pytest.mark.parametrize("kind", list(HolderKind))
def test_moves_that_no_rule_allows(pool, kind):
    legal = {
        HolderKind.IMPORT: {HolderKind.TABLE, HolderKind.QUARANTINE},
        HolderKind.LEASE: {HolderKind.QUARANTINE},
    }
    source = {
        HolderKind.TABLE: table(),
        HolderKind.LEASE: lease(),
        HolderKind.IMPORT: importer(),
        HolderKind.QUARANTINE: quarantine(),
    }[kind]
    blocks = pool.allocate(importer("seed"), 2)
    pool.move_all(importer("seed"), table("seed"))
    if kind is HolderKind.IMPORT:
        blocks = pool.allocate(source, 2)
    elif kind is HolderKind.QUARANTINE:
        pool.share(lease("seed"), blocks)
        pool.move_all(lease("seed"), source)
    else:
        pool.share(source, blocks)
    for target_kind in set(HolderKind) - legal.get(kind, set()):
        refused(pool, pool.move, source, Owner(target_kind, "other"), blocks, match="cannot move")


def test_wrong_calls_name_the_block_and_change_nothing(pool):
    mine = pool.allocate(table("a"), 3)
    refused(pool, pool.share, table("a"), [mine[0]], match="table a already holds block 1")
    refused(pool, pool.share, table("b"), [mine[0], 16], match="table b cannot share free block 16")
    refused(pool, pool.share, table("b"), [mine[0], mine[0]], match="named twice")
    refused(pool, pool.share, table("b"), [mine[0], 0], match="block 0 is reserved")
    refused(pool, pool.share, table("b"), [17], match="block 17 is reserved or outside")
    refused(pool, pool.share, table("b"), [-1], match="block -1 is reserved or outside")
    refused(pool, pool.share, importer("b"), mine, match="import b cannot share")
    refused(pool, pool.share, quarantine("b"), mine, match="quarantine b cannot share")
    refused(pool, pool.release, table("a"), [mine[0], 9], match="table a does not hold free block 9")
    refused(
        pool, pool.release, table("b"), [mine[0]], match=r"table b does not hold active block 1 \(held by table a\)"
    )
    refused(pool, pool.release, table("a"), [mine[0], mine[0]], match="named twice")
    refused(pool, pool.allocate, lease(), 1, match="lease l cannot allocate")
    refused(pool, pool.allocate, quarantine(), 1, match="quarantine q cannot allocate")
    refused(pool, pool.allocate, table(), -1, match="cannot allocate -1")
    refused(pool, pool.seal, 9, bytes(16), match="cannot seal free block 9")
    refused(pool, pool.seal, 0, bytes(16), match="block 0 is reserved")
    pool.seal(mine[0], bytes(16))
    refused(pool, pool.seal, mine[0], b"x" * 16, match="block 1 is sealed as 0000")
    pool.share(lease("a"), mine)
    pool.share(lease("b"), mine)
    pool.move_all(lease("a"), quarantine())
    refused(pool, pool.move, lease("b"), quarantine(), mine, match="quarantine q already holds block 1")


def test_nothing_to_do_leaves_no_owner_behind(pool):
    assert pool.allocate(table(), 0) == []
    pool.share(table(), [])
    pool.release(table(), [])
    pool.move(importer(), table(), [])
    assert pool.release_all(table()) == []
    assert pool.move_all(importer(), quarantine()) == []


def spoil_generation_of_holders(pool):
    pool._holders[HolderKind.TABLE][1] += 1


def spoil_free_list(pool):
    pool._free.add([1])


def spoil_state(pool):
    pool._states[1] = BlockState.EXPORTED


def spoil_parked(pool):
    pool._index.park(1)


def spoil_owner(pool):
    pool._holdings[importer("ghost")] = {1: None}
    pool._holders[HolderKind.IMPORT][1] += 1
    pool._settle([1])


def spoil_totals(pool):
    pool._totals[BlockState.FREE] -= 1


@pytest.mark.parametrize(
    "spoil",
    [spoil_generation_of_holders, spoil_free_list, spoil_state, spoil_parked, spoil_owner, spoil_totals],
    ids=lambda spoil: spoil.__name__,
)
def test_integrity_check_sees_each_kind_of_damage(spoil):
    pool = BlockPool(17, 4)
    sealed(pool, table("a"), 2)
    pool.check_integrity()
    spoil(pool)
    with pytest.raises(InvariantViolation) as caught:
        pool.check_integrity()
    if spoil is not spoil_totals:
        assert "block 1 (held by" in caught.value.message
        assert "table a" in caught.value.message
