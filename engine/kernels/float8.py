"""Eight-bit elements in the kernels, by whole numbers alone: so it runs the same on GPUs that have no such type.

What these give is what :mod:`engine.float8` gives, to the bit.
"""

# Triton itself gives the kernels' parameters their types.
# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

FORMATS: dict[torch.dtype, int] = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
"""What the kernels call each type; 0 is a cache of the type that is computed in."""


@triton.jit
def narrowed(values, inverse, FORMAT: tl.constexpr):
    """Codes (uint8) of ``values`` times ``inverse``: rounded to the nearest, ties to even, within the finite range."""
    SHIFT: tl.constexpr = 20 if FORMAT == 1 else 21  # bits of a float32's mantissa that are lost
    BIAS: tl.constexpr = 120 if FORMAT == 1 else 112
    LARGEST: tl.constexpr = 0x43E00000 if FORMAT == 1 else 0x47600000  # 448 and 57344
    NORMAL: tl.constexpr = 0x3C800000 if FORMAT == 1 else 0x38800000  # 2**-6 and 2**-14
    # Its last bit is the type's smallest step: what is added to it is rounded to that.
    BASE: tl.constexpr = 0x46800000 if FORMAT == 1 else 0x43000000  # 2**14 and 2**7
    bits = (values.to(tl.float32) * inverse).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    held = tl.minimum(magnitude, LARGEST)
    normal = ((held + ((1 << (SHIFT - 1)) - 1) + ((held >> SHIFT) & 1)) >> SHIFT) - (BIAS << (23 - SHIFT))
    base = tl.full(held.shape, BASE, tl.int32)
    steps = (held.to(tl.float32, bitcast=True) + base.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - BASE
    code = tl.where(held < NORMAL, steps, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def widened(codes, FORMAT: tl.constexpr):
    """Elements (float16, exact) of ``codes`` (uint8), without their scale."""
    wide = codes.to(tl.int16)
    if FORMAT == 1:
        # A float16 with these bits in their places is smaller by 2**8. The one magnitude that is no number, 127,
        # carries into the highest bit of the exponent.
        sign = (wide & 0x80) << 8
        none = (((wide & 0x7F) + 1) & 0x80) << 7
        return (((wide & 0x7F) << 7) | none | sign).to(tl.float16, bitcast=True) * 256.0
    return (wide << 8).to(tl.float16, bitcast=True)
