"""paged_prefill against its float64 reference (run by test_kernels.py)."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_pools import NOWHERE, far_block, poisoned_pool

from engine.float8 import UNSCALED
from engine.kernels import reference
from engine.kernels.operands import HEAD_DIMS
from engine.kernels.paged_prefill import paged_prefill
from engine.kernels.tiles import launch, plan_tiles
from protocol.errors import ConfigError, EngineFailure

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = tuple(TOLERANCE)


def problem(
    kv_heads,
    group,
    head_dim,
    block_size,
    dtype,
    order,
    device,
    chunks,
    window=0,
    seed=0,
    *,
    kept=None,
    scales=UNSCALED,
):
    """Queries of ``chunks`` (tokens in the cache, tokens to compute), over a pool of NaN but for what they see.

    Returns the operands of the reference, and the tiles.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = [cached + count for cached, count in chunks]
    width = max(-(-length // block_size) for length in lengths)
    num_blocks = len(chunks) * width + 1
    _, k_cache, v_cache = poisoned_pool(num_blocks, kv_heads, head_dim, block_size, kept or dtype, order, device)
    tables = (torch.randperm(num_blocks - 1, generator=generator) + 1).to(torch.int32).reshape(len(chunks), width)
    for row, (cached, _) in enumerate(chunks):
        seen = range(max(cached + 1 - window, 0) if window else 0, lengths[row])
        slots = [int(tables[row, i // block_size]) * block_size + i % block_size for i in seen]
        k, v = (torch.randn(len(seen), kv_heads, head_dim, generator=generator).to(device, dtype) for _ in range(2))
        reference.store_kv(k, v, k_cache, v_cache, torch.tensor(slots), order, scales)
        tables[row, : seen.start // block_size] = NOWHERE
        tables[row, -(-lengths[row] // block_size) :] = NOWHERE
    starts = np.concatenate(([0], np.cumsum([count for _, count in chunks])))
    seq_lens = np.array(lengths, np.int32)
    packed = torch.randn(int(starts[-1]), kv_heads * (group + 2), head_dim, generator=generator).to(device, dtype)
    operands = (
        *(packed[:, : kv_heads * group], k_cache, v_cache, tables.to(device)),
        torch.from_numpy(starts.astype(np.int32)).to(device),
        torch.from_numpy(seq_lens).to(device),
    )
    tiles = plan_tiles(starts, seq_lens, np.arange(len(chunks)), dtype, head_dim, group)
    return operands, torch.from_numpy(tiles).to(device)


def check(operands, tiles, order, scale, **scoring):
    q = operands[0]
    out = torch.full_like(q, torch.nan)
    paged_prefill(*operands, tiles, scale, order, out, **scoring)
    expected = reference.paged_prefill(*operands, scale, order, **scoring)
    assert bool(expected.isfinite().all())
    torch.testing.assert_close(out.double(), expected, rtol=0.0, atol=TOLERANCE[q.dtype])


SHAPES = [
    # kv heads, group, head dim, block size, order
    (2, 3, 64, 16, "NHD"),
    (1, 7, 80, 8, "HND"),
    (2, 1, 96, 4, "NHD"),
    (1, 4, 128, 16, "HND"),
    (1, 2, 256, 32, "NHD"),
    (1, 33, 64, 16, "HND"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "block_size", "order"), SHAPES)
def test_equals_float64(kv_heads, group, head_dim, block_size, order, dtype, device):
    chunks = [(0, 1), (block_size - 1, 9), (0, block_size + 1), (70, 3)]
    operands, tiles = problem(kv_heads, group, head_dim, block_size, dtype, order, device, chunks)
    check(operands, tiles, order, head_dim**-0.5)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chunks=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 30)), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (2, 3), (1, 6), (3, 2), (1, 9)]),
    head_dim=st.sampled_from([64, 80]),
    block_size=st.sampled_from([4, 16, 24]),
    dtype=st.sampled_from(DTYPES),
    order=st.sampled_from(["HND", "NHD"]),
    window=st.sampled_from([0, 1, 3, 17, 64, 100, 500]),
    softcap=st.sampled_from([0.0, 0.7, 30.0]),
    seed=st.integers(0, 99),
)
def test_any_chunks_windows_and_caps(chunks, heads, head_dim, block_size, dtype, order, window, softcap, seed, device):
    operands, tiles = problem(*heads, head_dim, block_size, dtype, order, device, chunks, window, seed)
    check(operands, tiles, order, head_dim**-0.5, window=window, softcap=softcap)


@pytest.mark.parametrize("window", [0, 20])
def test_the_borders_between_the_loops_are_where_masks_begin_to_count(window, device):
    # Steps of 16 keys: the first query that sees 63, 64 or 65 keys, and windows that end 16 keys apart.
    chunks = [(62, 3), (63, 2), (64, 2), (40, 17)]
    assert launch(torch.float32, 64, 1).block_n == 16
    operands, tiles = problem(1, 1, 64, 16, torch.float32, "NHD", device, chunks, window)
    check(operands, tiles, "NHD", 0.125, window=window)


def test_huge_scores_do_not_overflow(device):
    operands, tiles = problem(1, 2, 64, 16, torch.float32, "NHD", device, [(30, 40)])
    check(operands, tiles, "NHD", 1000.0)


def test_only_the_tokens_of_the_tiles_are_written(device):
    chunks = [(3, 9), (5, 1), (0, 40)]
    operands, _ = problem(2, 3, 64, 16, torch.float32, "NHD", device, chunks)
    starts, lengths = (operand.cpu().numpy() for operand in operands[-2:])
    tiles = plan_tiles(starts, lengths, np.array([0, 2]), torch.float32, 64, 3)
    out = torch.full_like(operands[0], torch.nan)
    paged_prefill(*operands, torch.from_numpy(tiles).to(device), 0.125, "NHD", out)
    assert bool(out[9].isnan().all())
    assert bool(out[:9].isfinite().all())
    assert bool(out[10:].isfinite().all())
    none = torch.empty(0, 2, dtype=torch.int32, device=device)
    paged_prefill(*operands, none, 0.125, "NHD", out.fill_(7.0))
    assert bool((out == 7.0).all())


def test_a_block_beyond_two_to_the_31_elements(tmp_path, device):
    cache = far_block(tmp_path, device, block_size=4, kv_heads=1, head_dim=64)
    cache[2] = torch.randn(4, 1, 64, generator=torch.Generator().manual_seed(0)).to(device, torch.float16)
    q = torch.ones(3, 2, 64, dtype=torch.float16, device=device)
    table, start, length, tiles = (
        torch.tensor(values, dtype=torch.int32, device=device) for values in ([[2]], [0, 3], [4], [[0, 0]])
    )
    near = cache[2:].clone()
    out = torch.empty_like(q)
    paged_prefill(q, cache, cache, table, start, length, tiles, 0.125, "NHD", out)
    expected = reference.paged_prefill(q, near, near, table - 2, start, length, 0.125, "NHD")
    torch.testing.assert_close(out.double(), expected, rtol=0.0, atol=TOLERANCE[torch.float16])


@given(
    chunks=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 700)), min_size=1, max_size=12),
    group=st.sampled_from([1, 3, 4, 7, 8, 48]),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_tiles_cover_each_wanted_token_once_and_the_longest_come_first(chunks, group, dtype, data):
    counts = np.array([count for _, count in chunks])
    starts = np.concatenate(([0], np.cumsum(counts)))
    lengths = np.array([sum(chunk) for chunk in chunks], np.int32)
    rows = np.array(data.draw(st.lists(st.integers(0, len(chunks) - 1), unique=True)), np.intp)
    tiles = plan_tiles(starts, lengths, rows, dtype, 64, group)
    tokens = launch(dtype, 64, group).block_m // group
    covered = [(row, first + i) for row, first in tiles.tolist() for i in range(min(tokens, counts[row] - first))]
    assert sorted(covered) == sorted((int(row), i) for row in rows for i in range(counts[row]))
    ends = [lengths[row] - counts[row] + min(first + tokens, counts[row]) for row, first in tiles.tolist()]
    assert ends == sorted(ends, reverse=True)


def test_tiles_are_what_a_dot_takes():
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            for group in (1, 3, 8, 71):
                for amd in (False, True):
                    launched = launch(dtype, head_dim, group, amd=amd)
                    assert min(launched.block_m, launched.block_n) >= 16
                    assert launched.block_m >= group
                    assert launched.block_m.bit_count() == launched.block_n.bit_count() == 1
                    narrow = launch(dtype, head_dim, group, 1, amd=amd)
                    # Tiles are planned from what is computed in alone.
                    assert narrow.block_m == launched.block_m
                    assert narrow.block_n in (16, 32, 64)


def test_wrong_operands_are_named(device):
    operands, tiles = problem(2, 2, 64, 16, torch.float32, "NHD", device, [(5, 4), (0, 9)])
    names = ("q", "k_cache", "v_cache", "block_tables", "query_start", "seq_lens")
    good = dict(zip(names, operands, strict=True))
    good |= {"tiles": tiles, "scale": 1.0, "order": "NHD", "out": torch.empty_like(operands[0])}
    q, out, tables = good["q"], good["out"], good["block_tables"]
    wrong = [
        (ConfigError, "order", "nhd", "'nhd'"),
        (EngineFailure, "q", q[0], "three dimensions"),
        (EngineFailure, "q", q[:, :3], "multiple of 2 heads, got 3"),
        (EngineFailure, "q", q.half(), "float16"),
        (EngineFailure, "block_tables", tables[0], "two dimensions"),
        (EngineFailure, "block_tables", tables.long(), "int64"),
        (EngineFailure, "query_start", good["query_start"][:2], r"got \(2,\)"),
        (EngineFailure, "query_start", good["query_start"].long(), "int64"),
        (EngineFailure, "seq_lens", good["seq_lens"][:1], r"got \(1,\)"),
        (EngineFailure, "tiles", tiles[:, :1], r"got \(\d, 1\)"),
        (EngineFailure, "tiles", tiles[:, 0], r"shape \(.*, 2\)"),
        (EngineFailure, "tiles", tiles.long(), "int64"),
        (EngineFailure, "tiles", torch.cat((tiles, tiles), 1)[:, :2], "contiguous"),
        (EngineFailure, "out", out[1:], r"got \(12, 4, 64\)"),
        (EngineFailure, "out", out.half(), "float16"),
        (EngineFailure, "scale", float("inf"), "finite, got inf"),
        (EngineFailure, "window", -1, "got -1"),
        (EngineFailure, "softcap", float("nan"), "got nan"),
    ]
    for error, field, value, match in wrong:
        with pytest.raises(error, match=match) as caught:
            paged_prefill(**{**good, field: value})
        assert caught.value.field == field
