"""Eight-bit caches: what is kept is the nearest number, in every backend the same, and attention over it is exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention_backends import CPU, NUM_BLOCKS, chunk_shapes, native, scattered

from engine.attention import create_backend
from engine.attention.backend import Scoring
from engine.attention.native import NativeAttention
from engine.float8 import LARGEST, UNSCALED, Scales, narrowed, widened
from engine.kv_cache import TORCH_DTYPES, KVCache
from protocol.layout import FLOAT8, CacheDtype, KVLayout, Order

COMPUTED_IN = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Relative rounding of a result."""


def awkward(count: int, seed: int, largest: float) -> torch.Tensor:
    """Numbers of every size that a float has, ties and borders among them."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(count, generator=generator) * torch.exp2(torch.randint(-24, 20, (count,), generator=generator))
    ties = torch.arange(1, 64) * 2.0**-10
    borders = torch.tensor([0.0, largest, largest * 1.03, largest * 1.2, 1e30, 1e-40, 2.0**-10, 2.0**-17, torch.inf])
    found = torch.cat((spread, ties, ties * 2.0**8, ties * 2.0**-8, borders))
    return torch.cat((found, -found))


def nearest(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest finite number of ``dtype`` to each value, of two as near the one whose last bit is 0; by search."""
    codes = torch.arange(127).to(torch.uint8)
    numbers = codes.view(dtype).double()
    numbers = numbers[numbers.isfinite()]
    distances = (values.double().abs()[:, None].clamp(max=LARGEST[dtype]) - numbers).abs()
    odd = torch.arange(len(numbers)) % 2
    # Two that are as near are neighbours: of those the even code.
    best = torch.where(distances == distances.amin(1, keepdim=True), odd, 2).argmin(1)
    return numbers[best].copysign(values.double())


@pytest.mark.parametrize("dtype", LARGEST)
def test_what_is_kept_is_the_nearest_number(dtype: torch.dtype) -> None:
    values = awkward(4000, 1, LARGEST[dtype])
    kept = narrowed(values, dtype, 1.0)
    assert kept.double().isfinite().all()
    assert torch.equal(kept.double(), nearest(values, dtype))
    halved = narrowed(values, dtype, 0.5)
    assert torch.equal(halved.double(), nearest(values * 2.0, dtype))
    assert narrowed(torch.tensor([torch.nan]), dtype, 1.0).float().isnan().all()


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("wide", COMPUTED_IN)
def test_every_element_comes_out_as_torch_says(dtype: torch.dtype, wide: torch.dtype) -> None:
    kept = torch.arange(256).to(torch.uint8).view(dtype)
    torch.testing.assert_close(widened(kept, wide), kept.to(wide), rtol=0.0, atol=0.0, equal_nan=True)


@native.marks[0]
@pytest.mark.parametrize("name", FLOAT8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_keep_what_torch_keeps(name: CacheDtype, dtype: torch.dtype) -> None:
    """To the bit, of numbers of every size and of what is no number; K not turned."""
    values = awkward(5000, 2, LARGEST[TORCH_DTYPES[name]])
    values[7] = torch.nan
    values = values[: len(values) // 64 * 64].to(dtype)
    tokens, scales = len(values) // 64, Scales(0.37, 3.0)
    layout = KVLayout(num_layers=1, kv_heads=1, head_dim=32, block_size=4, dtype=name)
    qkv = torch.cat((torch.zeros(tokens, 1, 32, dtype=dtype), values.view(tokens, 2, 32)), dim=1)
    angles = (torch.ones(tokens, 1, 16, dtype=dtype), torch.zeros(tokens, 1, 16, dtype=dtype))
    pools = []
    for backend in ("reference", "native"):
        cache = KVCache(layout, NUM_BLOCKS)
        plan = create_backend(backend, layout, CPU, dtype).plan(scattered([(0, tokens)], 4, 0))
        if backend == "native":
            # A turn by nothing: 0 * infinity is no number, so what is infinite stays out of K.
            qkv[:, 1] = qkv[:, 1].nan_to_num(0.0, 3e4, -3e4)
            plan.rotate_and_store(qkv.clone(), angles, *cache.layer(0), scales)
        else:
            finite = qkv[:, 1:2].nan_to_num(0.0, 3e4, -3e4)
            plan.store(finite, qkv[:, 2:], *cache.layer(0), scales)
        pools.append(cache.tensor.view(torch.uint8))
    assert torch.equal(*pools)


@pytest.mark.parametrize("name", ["sdpa", native])
@settings(max_examples=15, deadline=None)
@given(
    shapes=chunk_shapes(),
    heads=st.sampled_from([(1, 1), (3, 3), (6, 2), (9, 3), (18, 1)]),
    block_size=st.sampled_from([4, 16, 24]),
    order=st.sampled_from(["NHD", "HND"]),
    head_dim=st.sampled_from([8, 20, 32, 64, 256]),
    dtype=st.sampled_from(sorted(COMPUTED_IN, key=str)),
    kept=st.sampled_from(FLOAT8),
    scales=st.sampled_from([UNSCALED, Scales(0.013, 0.3), Scales(0.004, 2.0)]),
    window=st.sampled_from([0, 0, 17]),
    softcap=st.sampled_from([0.0, 0.0, 0.8]),
    seed=st.integers(0, 1 << 16),
)
def test_attention_over_an_eight_bit_cache_equals_float64_over_what_it_stands_for(
    name: str,
    shapes: list[tuple[int, int]],
    heads: tuple[int, int],
    block_size: int,
    order: Order,
    head_dim: int,
    dtype: torch.dtype,
    kept: CacheDtype,
    scales: Scales,
    window: int,
    softcap: float,
    seed: int,
) -> None:
    if name == "native" and dtype == torch.float16:
        dtype = torch.bfloat16
    query_heads, kv_heads = heads
    batch = scattered(shapes, block_size, seed)
    layout = KVLayout(
        num_layers=2, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=kept, order=order
    )
    generator = torch.Generator().manual_seed(seed)
    tokens = len(batch.token_ids)
    qkv = torch.randn(tokens, query_heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    context = torch.randn(layout.pool_shape(NUM_BLOCKS), generator=generator)
    outs, pools = [], []
    for backend in ("reference", name):
        cache = KVCache(layout, NUM_BLOCKS)
        k_cache, v_cache = cache.layer(1)
        for part, scale in ((0, scales.k), (1, scales.v)):
            cache.tensor[:, 1, part] = narrowed(context[:, 1, part], TORCH_DTYPES[kept], scale)
        # What lies behind a sequence's end is nobody's, and what is not a number there must not spread.
        held = {
            int(block)
            for row, length in zip(batch.block_table, batch.seq_lens, strict=True)
            for block in row[: -(-int(length) // block_size)]
        }
        cache.tensor[[block for block in range(NUM_BLOCKS) if block not in held]] = torch.nan
        plan = create_backend(backend, layout, CPU, dtype).plan(batch)
        plan.store(qkv[:, query_heads : query_heads + kv_heads], qkv[:, -kv_heads:], k_cache, v_cache, scales)
        out = plan.forward(qkv[:, :query_heads], k_cache, v_cache, Scoring(head_dim**-0.5, window, softcap), scales)
        assert out.dtype == dtype
        outs.append(out.float())
        pools.append(cache.tensor.view(torch.uint8))
    assert torch.equal(*pools)
    torch.testing.assert_close(outs[1], outs[0], rtol=COMPUTED_IN[dtype], atol=3 * COMPUTED_IN[dtype])


@pytest.mark.parametrize("name", ["sdpa", native])
@pytest.mark.parametrize("kept", FLOAT8)
def test_a_nan_in_the_context_is_not_hidden(name: str, kept: CacheDtype) -> None:
    layout = KVLayout(num_layers=1, kv_heads=1, head_dim=32, block_size=4, dtype=kept)
    for count in (1, 7):
        batch = scattered([(5, count)], 4, 0)
        for poisoned in (0, 1):
            cache = KVCache(layout, NUM_BLOCKS)
            cache.layer(0)[poisoned][batch.block_table[0, 0], 1, 0] = torch.nan
            plan = create_backend(name, layout, CPU, torch.bfloat16).plan(batch)
            out = plan.forward(torch.ones(count, 2, 32, dtype=torch.bfloat16), *cache.layer(0), Scoring(0.1))
            assert out[..., 0].isnan().all()


@native.marks[0]
def test_the_best_backend_of_a_cpu_takes_eight_bits() -> None:
    layout = KVLayout(num_layers=1, kv_heads=1, head_dim=64, block_size=16, dtype="float8_e4m3")
    assert isinstance(create_backend("auto", layout, CPU, torch.bfloat16), NativeAttention)


@pytest.mark.parametrize("kept", FLOAT8)
def test_blocks_are_copied_to_the_bit(kept: CacheDtype) -> None:
    cache = KVCache(KVLayout(num_layers=2, kv_heads=1, head_dim=64, block_size=4, dtype=kept), 5)
    codes = torch.arange(cache.nbytes).to(torch.uint8).view(cache.tensor.shape)
    codes[1:] += torch.arange(1, 5, dtype=torch.uint8).view(-1, 1, 1, 1, 1, 1)
    cache.tensor.copy_(codes.view(cache.tensor.dtype))
    before = cache.tensor.view(torch.uint8).clone()
    cache.copy_blocks([(1, 3), (3, 4)])
    assert torch.equal(cache.tensor.view(torch.uint8), before[[0, 1, 2, 1, 3]])


@pytest.mark.parametrize("kept", FLOAT8)
def test_the_same_memory_holds_twice_the_blocks(kept: CacheDtype) -> None:
    wide, narrow = (
        KVLayout(num_layers=3, kv_heads=2, head_dim=32, block_size=16, dtype=dtype) for dtype in ("bfloat16", kept)
    )
    assert KVCache(wide, 20).nbytes == KVCache(narrow, 40).nbytes == wide.pool_bytes(20)
    assert 2 * narrow.bytes_per_token == wide.bytes_per_token
