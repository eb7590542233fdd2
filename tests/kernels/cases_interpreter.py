"""The repaired interpreter agrees with torch on bfloat16 (run by test_kernels.py)."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from interpreter import narrow, widen
from triton.runtime.errors import InterpreterError


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, n: tl.constexpr):
    at = tl.arange(0, n)[:, None] * n + tl.arange(0, n)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def cast_kernel(in_ptr, out_ptr, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(out_ptr + at, tl.load(in_ptr + at).to(out_ptr.dtype.element_ty))


@triton.jit
def add_kernel(in_ptr, out_ptr, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(out_ptr + at, tl.load(in_ptr + at) + tl.load(in_ptr + at))


def test_every_bfloat16_widens_and_narrows_exactly():
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = torch.from_numpy(bits).view(torch.bfloat16).float()
    assert np.array_equal(widen(bits), values.numpy(), equal_nan=True)
    numbers = ~np.isnan(widen(bits))
    assert np.array_equal(narrow(widen(bits))[numbers], bits[numbers])
    assert np.isnan(widen(narrow(widen(bits)[~numbers]))).all()


def test_narrowing_rounds_as_torch_does():
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    # Ties, and numbers just beside them.
    bits = np.concatenate([bits, (bits & 0xFFFF0000) + 0x8000, (bits & 0xFFFF0000) + 0x7FFF])
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(narrow(values), expected)


@pytest.mark.parametrize(
    ("source", "target"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)],
)
def test_cast_in_a_kernel_is_torchs(source, target):
    values = torch.randn(256, generator=torch.Generator().manual_seed(1)).to(source)
    out = torch.empty(256, dtype=target)
    cast_kernel[(1,)](values, out, n=256)
    assert torch.equal(out, values.to(target))


def test_dot_multiplies_values_and_not_bits():
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(32, 32, generator=generator).to(torch.bfloat16) for _ in range(2))
    out = torch.empty(32, 32)
    dot_kernel[(1,)](a, b, out, n=32)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


def test_arithmetic_on_bfloat16_is_refused():
    values = torch.ones(16, dtype=torch.bfloat16)
    with pytest.raises(InterpreterError, match="on bfloat16 in the interpreter"):
        add_kernel[(1,)](values, torch.empty_like(values), n=16)
