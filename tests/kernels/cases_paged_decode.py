"""paged_decode against its float64 reference (run by test_kernels.py)."""

import pytest
import torch
from paged_pools import NOWHERE, combined, far_block, poisoned_pool

from engine.float8 import UNSCALED
from engine.kernels import reference
from engine.kernels.operands import HEAD_DIMS
from engine.kernels.paged_decode import MAX_SPLITS, choose_splits, launch, paged_decode
from protocol.errors import ConfigError, EngineFailure

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}

SHAPES = [
    # kv heads, group, head dim, block size
    (2, 1, 64, 16),
    (3, 3, 64, 16),
    (1, 7, 80, 8),
    (2, 4, 96, 4),
    (2, 5, 128, 16),
    (1, 17, 64, 16),
    (1, 2, 256, 16),
]


def problem(kv_heads, group, head_dim, block_size, dtype, order, device, lengths, *, kept=None, scales=UNSCALED):
    """Queries and a pool in which only the tokens within ``lengths`` are numbers."""
    generator = torch.Generator().manual_seed(head_dim + group)
    width = max(1, *(-(-n // block_size) for n in lengths))
    num_blocks = len(lengths) * width + 1
    _, k_cache, v_cache = poisoned_pool(num_blocks, kv_heads, head_dim, block_size, kept or dtype, order, device)
    ids = (torch.randperm(num_blocks - 1, generator=generator) + 1).to(torch.int32).reshape(len(lengths), width)
    tables = torch.full_like(ids, NOWHERE)
    for row, length in enumerate(lengths):
        used = -(-length // block_size)
        tables[row, :used] = ids[row, :used]
        slots = [int(ids[row, i // block_size]) * block_size + i % block_size for i in range(length)]
        k, v = (torch.randn(length, kv_heads, head_dim, generator=generator).to(device, dtype) for _ in range(2))
        reference.store_kv(k, v, k_cache, v_cache, torch.tensor(slots), order, scales)
    packed = torch.randn(len(lengths), kv_heads * (group + 2), head_dim, generator=generator).to(device, dtype)
    q = packed[:, : kv_heads * group]
    return q, k_cache, v_cache, tables.to(device), torch.tensor(lengths, dtype=torch.int32, device=device)


@pytest.mark.parametrize(("shape", "dtype", "order"), combined(SHAPES, TOLERANCE, ["HND", "NHD"]), ids=str)
def test_equals_float64(shape, dtype, order, device):
    kv_heads, group, head_dim, block_size = shape
    lengths = [1, block_size - 1, block_size, block_size + 1, 131]
    operands = problem(kv_heads, group, head_dim, block_size, dtype, order, device, lengths)
    out = paged_decode(*operands, head_dim**-0.5, order, splits=2)
    expected = reference.paged_decode(*operands, head_dim**-0.5, order)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0.0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("splits", [1, 4, 32, None])
def test_any_number_of_splits(splits, device):
    operands = problem(2, 3, 64, 16, torch.float32, "NHD", device, [200, 33, 1])
    out = paged_decode(*operands, 0.125, "NHD", splits=splits)
    torch.testing.assert_close(
        out.double(), reference.paged_decode(*operands, 0.125, "NHD"), rtol=0.0, atol=TOLERANCE[torch.float32]
    )


@pytest.mark.parametrize(
    ("limits", "dtype", "splits"),
    combined(
        [(1, 0.0), (40, 0.0), (0, 0.7), (65, 5.0), (500, 50.0)],
        [torch.float32, torch.bfloat16],
        [1, 4],
    ),
    ids=str,
)
def test_windows_and_capped_scores(limits, dtype, splits, device):
    window, softcap = limits
    operands = problem(2, 3, 64, 16, dtype, "HND", device, [200, 65, 33, 1])
    scoring = {"window": window, "softcap": softcap}
    out = paged_decode(*operands, 0.125, "HND", splits=splits, **scoring)
    expected = reference.paged_decode(*operands, 0.125, "HND", **scoring)
    torch.testing.assert_close(out.double(), expected, rtol=0.0, atol=TOLERANCE[dtype])


def test_padded_row_of_length_0_gives_zeros(device):
    operands = problem(2, 2, 64, 16, torch.bfloat16, "NHD", device, [0, 40, 0])
    out = paged_decode(*operands, 0.125, "NHD")
    assert not out[0].any()
    assert not out[2].any()
    assert bool(out[1].any())


def test_huge_scores_do_not_overflow(device):
    q, *rest = problem(1, 2, 64, 16, torch.float32, "NHD", device, [70])
    out = paged_decode(q, *rest, 1000.0, "NHD", splits=2)
    torch.testing.assert_close(
        out.double(), reference.paged_decode(q, *rest, 1000.0, "NHD"), rtol=0.0, atol=TOLERANCE[torch.float32]
    )


def test_a_block_beyond_two_to_the_31_elements(tmp_path, device):
    cache = far_block(tmp_path, device, block_size=4, kv_heads=1, head_dim=64)
    cache[2] = torch.randn(4, 1, 64, generator=torch.Generator().manual_seed(0)).to(device, torch.float16)
    q = torch.ones(1, 2, 64, dtype=torch.float16, device=device)
    table = torch.tensor([[2]], dtype=torch.int32, device=device)
    length = torch.tensor([4], dtype=torch.int32, device=device)
    near = cache[2:].clone()
    out = paged_decode(q, cache, cache, table, length, 0.125, "NHD")
    expected = reference.paged_decode(q, near, near, table - 2, length, 0.125, "NHD")
    torch.testing.assert_close(out.double(), expected, rtol=0.0, atol=TOLERANCE[torch.float16])


def test_no_rows_is_no_work(device):
    q, k_cache, v_cache, tables, lengths = problem(2, 2, 64, 16, torch.float32, "NHD", device, [5])
    assert paged_decode(q[:0], k_cache, v_cache, tables[:0], lengths[:0], 0.125, "NHD").shape == (0, 4, 64)


def test_splits_fill_the_gpu_and_never_outnumber_the_tiles():
    for rows in (1, 3, 64, 2000):
        for max_tokens in (1, 64, 65, 4096, 1 << 20):
            splits = choose_splits(rows, 8, max_tokens, 64)
            assert splits.bit_count() == 1
            assert splits <= min(MAX_SPLITS, -(-max_tokens // 64))
    assert choose_splits(1, 8, 1 << 20, 64) == MAX_SPLITS
    assert choose_splits(64, 8, 1 << 20, 64) == 1


def test_tiles_are_what_a_dot_takes():
    for dtype in TOLERANCE:
        for head_dim in HEAD_DIMS:
            assert launch(dtype, head_dim).block_n >= 16


def test_wrong_operands_are_named(device):
    q, k_cache, v_cache, tables, lengths = problem(2, 2, 64, 16, torch.float32, "NHD", device, [5, 9])
    caches = (k_cache, v_cache)
    wrong = [
        (ConfigError, "order", (q, *caches, tables, lengths, 1.0, "nhd"), {}, "'nhd'"),
        (EngineFailure, "q", (q[0], *caches, tables, lengths, 1.0, "NHD"), {}, "three dimensions"),
        (EngineFailure, "q", (q[:, :3], *caches, tables, lengths, 1.0, "NHD"), {}, "multiple of 2 heads, got 3"),
        (EngineFailure, "q", (q[:, :0], *caches, tables, lengths, 1.0, "NHD"), {}, "multiple of 2 heads, got 0"),
        (EngineFailure, "q", (q[..., :32], *caches, tables, lengths, 1.0, "NHD"), {}, r"\(2, 4, 32\)"),
        (EngineFailure, "q", (q.half(), *caches, tables, lengths, 1.0, "NHD"), {}, "float16"),
        (EngineFailure, "block_tables", (q, *caches, tables[0], lengths, 1.0, "NHD"), {}, "two dimensions"),
        (EngineFailure, "block_tables", (q, *caches, tables[:1], lengths, 1.0, "NHD"), {}, r"got \(1, 1\)"),
        (EngineFailure, "block_tables", (q, *caches, tables.long(), lengths, 1.0, "NHD"), {}, "int64"),
        (EngineFailure, "seq_lens", (q, *caches, tables, lengths[:1], 1.0, "NHD"), {}, r"got \(1,\)"),
        (EngineFailure, "seq_lens", (q, *caches, tables, lengths.long(), 1.0, "NHD"), {}, "int64"),
        (EngineFailure, "scale", (q, *caches, tables, lengths, float("nan"), "NHD"), {}, "finite, got nan"),
        (EngineFailure, "window", (q, *caches, tables, lengths, 1.0, "NHD"), {"window": -1}, "got -1"),
        (EngineFailure, "softcap", (q, *caches, tables, lengths, 1.0, "NHD"), {"softcap": -1.0}, "got -1.0"),
        (EngineFailure, "splits", (q, *caches, tables, lengths, 1.0, "NHD"), {"splits": 3}, "got 3"),
        (EngineFailure, "splits", (q, *caches, tables, lengths, 1.0, "NHD"), {"splits": 64}, "got 64"),
    ]
    for error, field, operands, options, match in wrong:
        with pytest.raises(error, match=match) as caught:
            paged_decode(*operands, **options)
        assert caught.value.field == field
