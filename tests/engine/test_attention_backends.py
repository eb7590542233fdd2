"""The CPU's backends equal the float64 reference, for any batch."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import create_backend
from engine.attention.backend import Scoring
from engine.attention.native import NativeAttention
from engine.attention.sdpa import group_by_length
from engine.batch import BatchLimits, Chunk, FlatBatch, flatten
from engine.kv_cache import TORCH_DTYPES, KVCache
from engine.models.rope import rotate
from engine.native.library import load
from protocol.errors import ConfigError
from protocol.layout import CacheDtype, KVLayout, Order

CPU = torch.device("cpu")
NUM_BLOCKS = 128
KERNELS = load()


@st.composite
def chunk_shapes(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(tokens in the cache, tokens to compute) of each sequence."""
    shape = st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.integers(1, 20)))
    return draw(st.lists(shape, min_size=1, max_size=6))


def scattered(shapes: list[tuple[int, int]], block_size: int, seed: int) -> FlatBatch:
    blocks = iter(np.random.default_rng(seed).permutation(np.arange(1, NUM_BLOCKS)).tolist())
    chunks = []
    for start, count in shapes:
        table = [next(blocks) for _ in range(-(-(start + count) // block_size))]
        chunks.append(Chunk([0] * count, start, table))
    return flatten(chunks, BatchLimits(block_size, NUM_BLOCKS, 1, 1 << 20))


native = pytest.param("native", marks=pytest.mark.skipif(KERNELS is None, reason="no C++ compiler"))
TOLERANCE: dict[CacheDtype, float] = {"float32": 1e-5, "bfloat16": 2.0**-7}


@pytest.mark.parametrize("name", ["sdpa", native])
@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(range((KERNELS.linear_kind if KERNELS else 0) + 1)),
    shapes=chunk_shapes(),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (6, 2), (8, 1), (9, 3), (14, 2), (24, 3), (18, 1)]),
    block_size=st.sampled_from([4, 8, 16, 24]),
    order=st.sampled_from(["NHD", "HND"]),
    head_dim=st.sampled_from([8, 20, 32, 64, 96, 128]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    window=st.sampled_from([0, 0, 1, 3, 17, 64]),
    softcap=st.sampled_from([0.0, 0.0, 0.8, 30.0]),
    seed=st.integers(0, 1 << 16),
)
def test_backend_equals_reference(
    name: str,
    kind: int,
    shapes: list[tuple[int, int]],
    heads: tuple[int, int],
    block_size: int,
    order: Order,
    head_dim: int,
    dtype: CacheDtype,
    window: int,
    softcap: float,
    seed: int,
) -> None:
    query_heads, kv_heads = heads
    batch = scattered(shapes, block_size, seed)
    layout = KVLayout(
        num_layers=2, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype, order=order
    )
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(TORCH_DTYPES[dtype])

    context = random(NUM_BLOCKS * block_size, 2, kv_heads, head_dim)
    tokens = len(batch.token_ids)
    qkv = random(tokens, query_heads + 2 * kv_heads, head_dim)
    turns = torch.rand(tokens, 1, head_dim // 2, generator=generator) * 6
    angles = (turns.cos().to(qkv.dtype), turns.sin().to(qkv.dtype))
    turned = rotate(qkv[:, : query_heads + kv_heads].float(), *(part.float() for part in angles)).to(qkv.dtype)
    outs, pools = [], []
    for backend in ("reference", name):
        cache = KVCache(layout, NUM_BLOCKS)
        cache.tensor.fill_(torch.nan)
        k_cache, v_cache = cache.layer(1)
        for row, (start, _) in enumerate(shapes):
            for position in range(start):
                block, offset = batch.block_table[row, position // block_size], position % block_size
                for part, view in enumerate((k_cache, v_cache)):
                    place = (block, offset) if order == "NHD" else (block, slice(None), offset)
                    view[place] = context[block * block_size + offset, part]
        made = create_backend(backend, layout, CPU)
        if isinstance(made, NativeAttention):
            made.kind = min(made.kind, kind)  # what this CPU has, and what lesser ones have
        plan = made.plan(batch)
        if backend == "reference":
            plan.store(turned[:, query_heads:], qkv[:, query_heads + kv_heads :], k_cache, v_cache)
            q = turned[:, :query_heads]
        else:
            q = plan.rotate_and_store(qkv.clone(), angles, k_cache, v_cache)
        outs.append(plan.forward(q, k_cache, v_cache, Scoring(head_dim**-0.5, window, softcap)).float())
        pools.append(cache.tensor.float())
    torch.testing.assert_close(outs[1], outs[0], rtol=TOLERANCE[dtype], atol=3 * TOLERANCE[dtype])
    torch.testing.assert_close(
        pools[1], pools[0], rtol=TOLERANCE[dtype], atol=3 * TOLERANCE[dtype], equal_nan=True
    )  # NaN where nothing was stored, and nowhere else
    assert torch.isnan(pools[1][:, 0]).all()  # the other layer was not touched


@pytest.mark.skipif(KERNELS is None, reason="no C++ compiler")
@pytest.mark.parametrize(("start", "count"), [(0, 200), (230, 70), (128, 33), (399, 17), (500, 4)])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_a_chunk_after_a_long_context_equals_the_reference(start: int, count: int, head_dim: int) -> None:
    layout = KVLayout(num_layers=1, kv_heads=2, head_dim=head_dim, block_size=16, dtype="bfloat16")
    batch = scattered([(start, count), (start, 1)], 16, seed=start)
    cache = KVCache(layout, NUM_BLOCKS)
    generator = torch.Generator().manual_seed(start)
    cache.tensor.copy_(torch.randn(cache.tensor.shape, generator=generator))
    q = torch.randn(count + 1, 6, head_dim, generator=generator).bfloat16()
    expected, found = (
        create_backend(name, layout, CPU).plan(batch).forward(q, *cache.layer(0), Scoring(head_dim**-0.5)).float()
        for name in ("sdpa", "native")
    )
    torch.testing.assert_close(found, expected, rtol=2.0**-6, atol=2.0**-7)


@pytest.mark.parametrize("name", ["sdpa", native])
@pytest.mark.parametrize(("start", "count"), [(0, 300), (600, 40), (1023, 1), (240, 16)])
def test_long_contexts(name: str, start: int, count: int) -> None:
    layout = KVLayout(num_layers=1, kv_heads=1, head_dim=64, block_size=16, dtype="bfloat16")
    cache = KVCache(layout, NUM_BLOCKS)
    generator = torch.Generator().manual_seed(start)
    cache.tensor.copy_(torch.randn(cache.tensor.shape, generator=generator))
    q = (3.0 * torch.randn(count, 3, 64, generator=generator)).bfloat16()  # sharp, so that the highest score moves
    outs = [
        create_backend(backend, layout, CPU)
        .plan(scattered([(start, count)], 16, 1))
        .forward(q, *cache.layer(0), Scoring(0.125))
        for backend in ("reference", name)
    ]
    torch.testing.assert_close(outs[1].float(), outs[0].float(), rtol=2.0**-7, atol=2.0**-6)


@pytest.mark.skipif(KERNELS is None, reason="no C++ compiler")
@pytest.mark.parametrize("window", [0, 130, 300])
@pytest.mark.parametrize("block_size", [16, 24])
def test_a_decode_in_parts_is_the_reference_and_does_not_depend_on_the_others(window: int, block_size: int) -> None:
    # Some of one part, some of several, some that end where a part does.
    starts = [0, 15, 127, 128, 129, 255, 300, 383]
    layout = KVLayout(num_layers=1, kv_heads=3, head_dim=64, block_size=block_size, dtype="bfloat16")
    batch = scattered([(start, 1) for start in starts], block_size, seed=2)
    cache = KVCache(layout, NUM_BLOCKS)
    generator = torch.Generator().manual_seed(2)
    cache.tensor.copy_(torch.randn(cache.tensor.shape, generator=generator))
    q = (2.0 * torch.randn(len(starts), 15, 64, generator=generator)).bfloat16()
    scoring = Scoring(0.125, window)
    expected, found = (
        create_backend(name, layout, CPU).plan(batch).forward(q, *cache.layer(0), scoring)
        for name in ("reference", "native")
    )
    torch.testing.assert_close(found.float(), expected.float(), rtol=2.0**-7, atol=2.0**-7)
    for row in range(len(starts)):
        alone = replace(
            batch,
            query_start_loc=np.array([0, 1], batch.query_start_loc.dtype),
            block_table=batch.block_table[row : row + 1],
            seq_lens=batch.seq_lens[row : row + 1],
        )
        out = create_backend("native", layout, CPU).plan(alone).forward(q[row : row + 1], *cache.layer(0), scoring)
        assert torch.equal(out[0], found[row])


@pytest.mark.parametrize("name", ["sdpa", native])
def test_a_nan_in_the_context_is_not_hidden(name: str) -> None:
    layout = KVLayout(num_layers=1, kv_heads=1, head_dim=32, block_size=4, dtype="bfloat16")
    for count in (1, 7):
        batch = scattered([(5, count)], 4, 0)
        for poisoned in (0, 1):
            cache = KVCache(layout, NUM_BLOCKS)
            cache.layer(0)[poisoned][batch.block_table[0, 0], 1, 0] = torch.nan
            plan = create_backend(name, layout, CPU).plan(batch)
            out = plan.forward(torch.ones(count, 2, 32, dtype=torch.bfloat16), *cache.layer(0), Scoring(0.1))
            assert torch.isnan(out[..., 0]).all()


@given(lens=st.lists(st.integers(1, 2000), min_size=1, max_size=40))
def test_groups_cover_each_decode_once_and_pad_little(lens: list[int]) -> None:
    lengths = np.array(lens, np.int64)
    groups = group_by_length(lengths, np.arange(len(lens)), 16)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lens)))
    for group in groups:
        blocks = -(-lengths[group] // 16)
        assert (blocks.max() <= np.maximum(2 * blocks, blocks + 8)).all()
        assert len(group) == 1 or blocks.max() * len(group) * 16 <= 1 << 15


def test_unknown_backend_and_wrong_device_are_refused() -> None:
    for name in ("flash", "triton"):
        with pytest.raises(ConfigError, match=name) as caught:
            create_backend(name, KVLayout(num_layers=1, kv_heads=1, head_dim=64, block_size=16), CPU)
        assert caught.value.field == "attention"


def test_triton_backend_equals_reference_under_the_interpreter() -> None:
    # Its own process: the interpreter must be chosen before triton is first imported, and cannot be left again.
    script = Path(__file__).parent / "interpreted_triton.py"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["NHD", "HND", "float8_e4m3", "float8_e5m2"]


def test_a_model_by_the_triton_backend_equals_transformers_under_the_interpreter() -> None:
    cases = Path(__file__).parent / "cases_triton_model.py"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(cases))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
