"""Eight-bit floats, in which a KV cache may be kept: to and from what is computed with, in torch.

A stored element stands for itself times a scale, of which K and V of each layer have one (Micikevicius et al., "FP8
Formats for Deep Learning", 2022). On its way in a number is multiplied by the scale's reciprocal, held within what the
type can hold and rounded to the nearest, ties to even: so nothing that is a number becomes infinite or none. On its way
out the element is exact in any type that is computed in; the scale is applied where it costs least.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

LARGEST: dict[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""Largest number of each type."""
_E4M3_STEP = 256.0
"""A float16 with the bits of a float8_e4m3 in their places is smaller by the distance of the biases, 2**8."""
_NO_HIGH_EXPONENT = -0x4001
"""Of a float16: all bits but the highest of the exponent."""


class Scales(NamedTuple):
    """What the stored elements of one layer are to be multiplied by; 1 for a cache that is no eight-bit one."""

    k: float = 1.0
    v: float = 1.0


UNSCALED = Scales()


def is_float8(dtype: torch.dtype) -> bool:
    """Whether ``dtype`` is one of the eight-bit types."""
    return dtype in LARGEST


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """An eight-bit cache as its bytes, which torch can index on every device; any other as it is. A view."""
    return cache.view(torch.uint8) if is_float8(cache.dtype) else cache


def narrowed(values: torch.Tensor, dtype: torch.dtype, scale: float | torch.Tensor) -> torch.Tensor:
    """What ``values`` become in a cache of the eight-bit ``dtype``. What is not a number stays none.

    Args:
        values: of any float type; not changed.
        dtype: of the cache.
        scale: of them all, or a float32 tensor of scales that ``values`` can be multiplied by.
    """
    largest = LARGEST[dtype]
    return values.float().mul(1.0 / scale).clamp_(-largest, largest).to(dtype)


def widened(elements: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The elements of an eight-bit cache as ``dtype``, exactly; without their scale."""
    if elements.dtype == torch.float8_e5m2:
        return elements.to(dtype)
    # Faster on a CPU than torch's own. The one magnitude that is not a number, 127, carries into the highest bit of the
    # exponent.
    codes = elements.view(torch.int8).to(torch.int16)
    none = codes.bitwise_and(0x7F).add_(1).bitwise_and_(0x80).bitwise_left_shift_(7)
    bits = codes.bitwise_left_shift_(7).bitwise_and_(_NO_HIGH_EXPONENT).bitwise_or_(none)
    return bits.view(torch.float16).to(dtype).mul_(_E4M3_STEP)


def stored(values: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """What goes to :func:`as_bytes` of a cache of ``dtype`` for ``values``, whatever the cache's type is."""
    return narrowed(values, dtype, scale).view(torch.uint8) if is_float8(dtype) else values
