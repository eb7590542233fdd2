"""store_kv against its reference, to the bit (run by test_kernels.py)."""

import pytest
import torch
from paged_pools import bits, far_block, poisoned_pool

from engine.kernels import reference
from engine.kernels.store_kv import store_kv
from protocol.errors import ConfigError, EngineFailure

SHAPES = [
    # tokens, kv heads, head dim, block size
    (1, 1, 64, 16),
    (23, 3, 80, 4),
    (9, 2, 96, 8),
    (17, 8, 128, 16),
    (5, 2, 256, 16),
]


def new_tokens(tokens, kv_heads, head_dim, dtype, device):
    """K and V as a model makes them: slices of one packed projection."""
    generator = torch.Generator().manual_seed(tokens)
    packed = torch.randn(tokens, 4 + 2 * kv_heads, head_dim, generator=generator).to(device, dtype)
    return packed[:, 4 : 4 + kv_heads], packed[:, 4 + kv_heads :]


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "kv_heads", "head_dim", "block_size"), SHAPES)
def test_every_token_lands_in_its_slot_and_nothing_else_changes(
    tokens, kv_heads, head_dim, block_size, dtype, order, device
):
    num_blocks = 2 * -(-tokens // block_size) + 1
    k, v = new_tokens(tokens, kv_heads, head_dim, dtype, device)
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(1))[:tokens].to(device)
    slots[tokens // 2] = -1
    written, expected = (
        poisoned_pool(num_blocks, kv_heads, head_dim, block_size, dtype, order, device) for _ in range(2)
    )
    store_kv(k, v, written[1], written[2], slots, order)
    reference.store_kv(k, v, expected[1], expected[2], slots, order)
    assert torch.equal(bits(written[0]), bits(expected[0]))
    assert int((~written[0].isnan()).sum()) == 2 * (tokens - 1) * kv_heads * head_dim


def test_a_block_beyond_two_to_the_31_elements(tmp_path, device):
    cache = far_block(tmp_path, device, block_size=4, kv_heads=2, head_dim=64)
    k, _ = new_tokens(1, 2, 64, torch.float16, device)
    store_kv(k, k, cache, cache, torch.tensor([2 * 4 + 3], device=device), "NHD")
    assert torch.equal(cache[2, 3], k[0])


def test_no_tokens_is_no_work(device):
    pool, k_cache, v_cache = poisoned_pool(2, 2, 64, 4, torch.float32, "NHD", device)
    k, v = new_tokens(0, 2, 64, torch.float32, device)
    store_kv(k, v, k_cache, v_cache, torch.empty(0, dtype=torch.int64, device=device), "NHD")
    assert bool(pool.isnan().all())


def test_wrong_operands_are_named(device):
    _, k_cache, v_cache = poisoned_pool(2, 2, 64, 4, torch.float32, "NHD", device)
    k, v = new_tokens(3, 2, 64, torch.float32, device)
    slots = torch.zeros(3, dtype=torch.int64, device=device)
    wrong = [
        (ConfigError, "order", (k, v, k_cache, v_cache, slots, "DNH"), "'DNH'"),
        (ConfigError, "head_dim", (k, v, k_cache[..., :48], v_cache[..., :48], slots, "NHD"), "got 48"),
        (ConfigError, "dtype", (k, v, k_cache.double(), v_cache.double(), slots, "NHD"), "float64"),
        (EngineFailure, "k_cache", (k, v, k_cache[0], v_cache, slots, "NHD"), "four dimensions"),
        (EngineFailure, "k_cache", (k, v, k_cache.mT.contiguous().mT, v_cache, slots, "NHD"), "dense"),
        (EngineFailure, "v_cache", (k, v, k_cache, v_cache[:1], slots, "NHD"), r"\(1, 4, 2, 64\)"),
        (EngineFailure, "v_cache", (k, v, k_cache, v_cache.half(), slots, "NHD"), "float16"),
        (EngineFailure, "k", (k[0], v, k_cache, v_cache, slots, "NHD"), "three dimensions"),
        # The heads and tokens of the other order.
        (EngineFailure, "k", (k, v, k_cache, v_cache, slots, "HND"), r"got \(3, 2, 64\)"),
        (EngineFailure, "k", (k.half(), v, k_cache, v_cache, slots, "NHD"), "float16"),
        (EngineFailure, "v", (k, v[:2], k_cache, v_cache, slots, "NHD"), r"\(2, 2, 64\)"),
        (EngineFailure, "v", (k, v.mT.contiguous().mT, k_cache, v_cache, slots, "NHD"), "dense"),
        (EngineFailure, "slot_mapping", (k, v, k_cache, v_cache, slots[:2], "NHD"), r"\(2,\)"),
        (EngineFailure, "slot_mapping", (k, v, k_cache, v_cache, slots.int(), "NHD"), "int32"),
        (EngineFailure, "slot_mapping", (k, v, k_cache, v_cache, slots.to("meta"), "NHD"), "meta"),
    ]
    for error, field, operands, match in wrong:
        with pytest.raises(error, match=match) as caught:
            store_kv(*operands)
        assert caught.value.field == field
