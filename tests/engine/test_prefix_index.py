"""The hash chain is portable and names a whole prefix; the index finds, parks and evicts."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.prefix_index import HASH_BYTES, PrefixIndex, block_hashes, extend, root_hash
from protocol.errors import ConfigError, InvariantViolation

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def test_hash_is_the_same_in_every_release():
    assert [h.hex() for h in block_hashes(range(8), 4)] == [
        "c06c654e0ec683ac8c0ad139a539503c",
        "7dcd90eb2f7889a59cb8d25e82feb485",
    ]


@pytest.mark.parametrize("seed", ["0", "4711"])
def test_hash_is_the_same_in_another_process(seed):
    code = "from engine.prefix_index import block_hashes; print(block_hashes(range(50), 16, b'tenant')[-1].hex())"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == block_hashes(range(50), 16, b"tenant")[-1].hex()


@given(TOKENS, st.integers(1, 8), st.binary(max_size=40))
def test_chain_covers_full_blocks_and_equals_its_incremental_form(token_ids, block_size, salt):
    chain = block_hashes(token_ids, block_size, salt)
    assert len(chain) == len(token_ids) // block_size
    parent = root_hash(salt)
    for i, block_hash in enumerate(chain):
        parent = extend(parent, token_ids[i * block_size : (i + 1) * block_size])
        assert parent == block_hash
        assert len(block_hash) == HASH_BYTES


@given(TOKENS.filter(lambda ids: len(ids) >= 12), st.data())
def test_one_other_token_changes_its_block_and_all_later_ones(token_ids, data):
    at = data.draw(st.integers(0, len(token_ids) // 4 * 4 - 1))
    other = [*token_ids[:at], token_ids[at] ^ 1, *token_ids[at + 1 :]]
    for i, (mine, its) in enumerate(zip(block_hashes(token_ids, 4), block_hashes(other, 4), strict=True)):
        assert (mine == its) == (i < at // 4)


def test_salts_share_no_block():
    assert not set(block_hashes(range(64), 4, b"a")) & set(block_hashes(range(64), 4, b"b"))
    # A salt that looks like a parent and its tokens is still a salt.
    assert root_hash(root_hash() + bytes(16)) != extend(root_hash(), [0, 0, 0, 0])


def test_bad_input_is_named():
    with pytest.raises(ConfigError, match="block_size must be at least 1, got 0"):
        block_hashes([1], 0)
    with pytest.raises(InvariantViolation, match="got 2147483648"):
        extend(root_hash(), [1, 2**31])


def test_index_finds_the_longest_prefix_and_keeps_the_first_block_of_a_hash():
    index = PrefixIndex()
    chain = block_hashes(range(16), 4)
    assert index.insert(5, chain[0])
    assert index.insert(6, chain[1])
    assert index.insert(8, chain[3])
    assert index.find(chain) == [5, 6]
    assert index.find(chain[1:]) == [6]
    assert not index.insert(9, chain[0])
    assert 9 not in index
    assert index.find(chain[:1]) == [5]
    assert index.insert(5, chain[0])
    with pytest.raises(InvariantViolation, match="block 5 is sealed as"):
        index.insert(5, chain[2])
    index.check_integrity()
    assert len(index) == 3


def test_index_evicts_what_was_parked_first():
    index = PrefixIndex()
    chain = block_hashes(range(16), 4)
    for block, block_hash in enumerate(chain, start=1):
        index.insert(block, block_hash)
    for block in (3, 1, 2):
        index.park(block)
    index.unpark(3)
    index.park(3)
    assert index.parked == 3
    assert [index.evict() for _ in range(3)] == [1, 2, 3]
    assert index.find(chain) == []
    assert index.find(chain[3:]) == [4]
    index.check_integrity()
