"""Eight-bit elements in the kernels: to the bit what torch keeps, and attention over them (run by test_kernels.py)."""

import cases_paged_prefill
import pytest
import torch
import triton
import triton.language as tl
from cases_paged_decode import TOLERANCE, problem
from cases_store_kv import new_tokens
from paged_pools import LAYER, bits, poisoned_pool

from engine.float8 import LARGEST, UNSCALED, Scales, narrowed, widened
from engine.kernels import float8, reference
from engine.kernels.paged_decode import paged_decode
from engine.kernels.paged_prefill import paged_prefill
from engine.kernels.store_kv import store_kv
from protocol.errors import EngineFailure

SCALED = Scales(0.013, 0.3)


@triton.jit
def narrow_kernel(in_ptr, out_ptr, inverse, n: tl.constexpr, form: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, n)
    tl.store(out_ptr + at, float8.narrowed(tl.load(in_ptr + at), inverse, form))


@triton.jit
def widen_kernel(in_ptr, out_ptr, n: tl.constexpr, form: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(out_ptr + at, float8.widened(tl.load(in_ptr + at), form).to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("kept", LARGEST, ids=str)
def test_every_code_is_widened(kept, device):
    codes = torch.arange(256, dtype=torch.int16).to(device, torch.uint8)
    for wide in TOLERANCE:
        out = torch.empty(256, dtype=wide, device=device)
        widen_kernel[(1,)](codes, out, n=256, form=float8.FORMATS[kept])
        expected = widened(codes.view(kept), wide)
        torch.testing.assert_close(out, expected, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("kept", LARGEST, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_of_every_size_are_kept_as_torch_keeps_them(dtype, kept, device):
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(-(1 << 31), (1 << 31) - 1, (1 << 13,), generator=generator).to(torch.int32)
    near = torch.randn(1 << 13, generator=generator) * torch.exp2(torch.arange(1 << 13) % 30 - 18.0)
    ties = torch.arange(1 << 13).float() * 2.0**-10
    values = torch.cat((values.view(torch.float32), near, ties)).to(device, dtype)
    values[values.isnan()] = torch.nan  # numpy, which interprets, warns of those that are to signal
    out = torch.empty(len(values), dtype=torch.uint8, device=device)
    narrow_kernel[(len(values) // 4096,)](values, out, 1 / 1.4, n=4096, form=float8.FORMATS[kept])
    expected = narrowed(values, kept, 1.4)
    none = expected.float().isnan()
    assert torch.equal(none, values.isnan())
    assert torch.equal(out.view(kept).float().isnan(), none)
    assert torch.equal(out[~none], expected.view(torch.uint8)[~none])


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("kept", LARGEST, ids=str)
def test_tokens_are_stored_to_the_bit_and_nothing_else_changes(kept, order, device):
    k, v = new_tokens(9, 3, 80, torch.bfloat16, device)
    slots = torch.tensor([3, -1, 17, 0, 8, 9, 10, 24, 25], device=device)
    written, expected = (poisoned_pool(7, 3, 80, 4, kept, order, device) for _ in range(2))
    store_kv(k, v, written[1], written[2], slots, order, SCALED)
    reference.store_kv(k, v, expected[1], expected[2], slots, order, SCALED)
    assert torch.equal(bits(written[0]), bits(expected[0]))
    assert int((~written[0][:, LAYER].float().isnan()).sum()) == 2 * 8 * 3 * 80


@pytest.mark.parametrize(
    ("kept", "scales", "dtype", "order", "scoring"),
    [
        (torch.float8_e4m3fn, SCALED, torch.bfloat16, "NHD", {}),
        (torch.float8_e4m3fn, SCALED, torch.bfloat16, "HND", {"window": 40, "softcap": 5.0}),
        (torch.float8_e4m3fn, UNSCALED, torch.float16, "NHD", {"window": 40}),
        (torch.float8_e5m2, SCALED, torch.float16, "HND", {"softcap": 5.0}),
        (torch.float8_e5m2, UNSCALED, torch.bfloat16, "NHD", {}),
    ],
    ids=str,
)
def test_decode_equals_float64_over_what_is_kept(kept, scales, dtype, order, scoring, device):
    operands = problem(2, 3, 80, 8, dtype, order, device, [1, 7, 8, 9, 70], kept=kept, scales=scales)
    out = paged_decode(*operands, 80**-0.5, order, splits=2, scales=scales, **scoring)
    expected = reference.paged_decode(*operands, 80**-0.5, order, scales=scales, **scoring)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=2.0**-10, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("kept", "scales", "dtype", "order", "head_dim", "scoring"),
    [
        (torch.float8_e4m3fn, SCALED, torch.bfloat16, "NHD", 80, {}),
        (torch.float8_e4m3fn, SCALED, torch.bfloat16, "HND", 64, {"window": 90, "softcap": 5.0}),
        (torch.float8_e4m3fn, UNSCALED, torch.float16, "NHD", 256, {"window": 40}),
        (torch.float8_e5m2, SCALED, torch.float16, "HND", 128, {"softcap": 5.0}),
        (torch.float8_e5m2, UNSCALED, torch.bfloat16, "NHD", 96, {"window": 90}),
    ],
    ids=str,
)
def test_prefill_equals_float64_over_what_is_kept(kept, scales, dtype, order, head_dim, scoring, device):
    # Of nothing, within a block, over steps that all queries see, and over more than a tile of queries.
    chunks = [(0, 1), (7, 9), (150, 4), (3, 50)]
    operands, tiles = cases_paged_prefill.problem(
        *(2, 3, head_dim, 8, dtype, order, device, chunks, scoring.get("window", 0)), kept=kept, scales=scales
    )
    cases_paged_prefill.check(operands, tiles, order, head_dim**-0.5, scales=scales, **scoring)


def test_a_nan_in_the_context_is_not_hidden(device):
    q, k_cache, v_cache, tables, lengths = problem(
        1, 2, 64, 4, torch.bfloat16, "NHD", device, [5], kept=torch.float8_e4m3fn
    )
    v_cache[int(tables[0, 0]), 1, 0, 3] = torch.nan
    out = paged_decode(q, k_cache, v_cache, tables, lengths, 0.125, "NHD")
    assert out[0, :, 3].isnan().all()
    operands, tiles = cases_paged_prefill.problem(
        *(1, 2, 64, 4, torch.bfloat16, "NHD", device, [(5, 3)]), kept=torch.float8_e4m3fn
    )
    q, _, v_cache, tables, *_ = operands
    v_cache[int(tables[0, 0]), 1, 0, 3] = torch.nan
    out = torch.empty_like(q)
    paged_prefill(*operands, tiles, 0.125, "NHD", out)
    assert out[:, :, 3].isnan().all()
    assert out[:, :, :3].isfinite().all()


def test_what_is_not_computed_in_is_refused(device):
    operands = problem(1, 2, 64, 4, torch.bfloat16, "NHD", device, [5], kept=torch.float8_e5m2)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    for dtype in (torch.float8_e5m2, torch.float32):
        q = operands[0].to(dtype)
        with pytest.raises(EngineFailure, match=str(dtype)) as caught:
            paged_decode(q, *operands[1:], 0.125, "NHD")
        assert caught.value.field == "q"
        with pytest.raises(EngineFailure, match=str(dtype)) as caught:
            store_kv(q, q, *operands[1:3], slots, "NHD")
        assert caught.value.field == "k"
    operands, tiles = cases_paged_prefill.problem(
        *(1, 2, 64, 4, torch.bfloat16, "NHD", device, [(5, 3)]), kept=torch.float8_e5m2
    )
    for dtype in (torch.float8_e5m2, torch.float32):
        q = operands[0].to(dtype)
        with pytest.raises(EngineFailure, match=str(dtype)) as caught:
            paged_prefill(q, *operands[1:], tiles, 0.125, "NHD", torch.empty_like(q))
        assert caught.value.field == "q"
