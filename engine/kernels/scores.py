"""What the attention kernels do with the product of a query and a key before the softmax."""

# Triton itself gives the functions' parameters their types.
# mypy: allow-incomplete-defs

from __future__ import annotations

import math

import triton
import triton.language as tl


@triton.jit
def score(products, score_in, score_out, CAPPED: tl.constexpr):
    """Scores in base 2: ``products * score_out``, capped ``tanh(products * score_in) * score_out``."""
    if CAPPED:
        # tanh by exp2, whose argument is never positive: it cannot overflow.
        small = tl.exp2(tl.abs(products * score_in) * -2.8853900817779268)
        products = tl.where(products < 0.0, -1.0, 1.0) * (1.0 - small) / (1.0 + small)
    return products * score_out


def score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """``score_in`` and ``score_out`` of :func:`score`; ``softcap`` 0 is none."""
    return scale / softcap if softcap else 0.0, (softcap or scale) * math.log2(math.e)
