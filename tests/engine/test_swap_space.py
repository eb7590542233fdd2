"""Blocks that go to host memory and come back are what they were, whatever happened in the pool meanwhile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.copy_queue import copy_queue
from engine.kv_cache import KVCache
from engine.swap_space import SwapSpace
from protocol.errors import ConfigError
from protocol.layout import KVLayout

LAYOUT = KVLayout(num_layers=2, kv_heads=2, head_dim=8, block_size=4, dtype="bfloat16")
DEVICES = [
    "cpu",
    pytest.param(
        "cuda:0",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
]


def filled(device: str, num_blocks: int = 12) -> KVCache:
    cache = KVCache(LAYOUT, num_blocks, device)
    generator = torch.Generator().manual_seed(1)
    cache.tensor.copy_(torch.randn(cache.tensor.shape, generator=generator).to(cache.tensor.dtype))
    return cache


def space_of(cache: KVCache, slots: int) -> SwapSpace:
    return SwapSpace(cache, copy_queue(cache.tensor.device), slots * LAYOUT.block_bytes + 1)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_what_comes_back_is_what_went_out(device: str, data: st.DataObject) -> None:
    cache = filled(device)
    before = cache.tensor.clone()
    space = space_of(cache, 9)
    assert space.num_slots == 9
    blocks = data.draw(st.permutations(range(1, 12)))[: data.draw(st.integers(0, 8))]
    slots = data.draw(st.permutations(range(1, 9)))[: len(blocks)]
    elsewhere = data.draw(st.permutations(range(1, 12)))[: len(blocks)]
    space.save(blocks, slots)
    cache.tensor.fill_(torch.nan)
    space.restore(slots, elsewhere)
    assert torch.equal(cache.tensor[elsewhere], before[blocks])
    untouched = [block for block in range(12) if block not in elsewhere]
    assert cache.tensor[untouched].isnan().all(), "only the named blocks are written"
    space.close()


@pytest.mark.parametrize("nbytes", [0, 1, LAYOUT.block_bytes - 1])
def test_less_than_a_block_is_no_slot(nbytes: int) -> None:
    cache = filled("cpu", 2)
    assert SwapSpace(cache, copy_queue(cache.tensor.device), nbytes).num_slots == 0


def test_no_more_is_kept_than_a_few_pools() -> None:
    cache = filled("cpu", 2)
    assert SwapSpace(cache, copy_queue(cache.tensor.device), 1 << 40).num_slots == 8 * cache.num_blocks


def test_memory_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.swap_space.POOLS", 1 << 60)
    cache = filled("cpu", 2)
    with pytest.raises(ConfigError, match="swap_bytes") as caught:
        SwapSpace(cache, copy_queue(cache.tensor.device), 1 << 60)
    assert caught.value.field == "swap_bytes"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_save_sees_what_the_steps_before_it_store() -> None:
    cache = filled("cuda:0")
    queue = copy_queue(cache.tensor.device)
    space = SwapSpace(cache, queue, 4 * LAYOUT.block_bytes)
    big = torch.randn(4096, 4096, device="cuda:0")
    for value in range(1, 4):
        for _ in range(8):
            big = (big @ big).clamp(-1, 1)
        cache.tensor[5].fill_(value + 0 * big[0, 0].nan_to_num())
        queue.mark()
        space.save([5], [1])
        cache.tensor[5].fill_(0)
        queue.mark()
        space.restore([1], [6])
        assert (cache.tensor[6] == value).all()
    space.close()
