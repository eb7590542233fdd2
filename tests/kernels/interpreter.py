"""Triton's interpreter (3.6 to 3.9), made to give what a GPU gives for bfloat16.

The interpreter keeps bfloat16 as its raw 16 bits. The stock one multiplies those bits in ``tl.dot``, adds them in
arithmetic, and truncates where a GPU rounds to nearest even. :func:`repair` mends casts and dots, and makes arithmetic
on bfloat16 an error: a kernel has to go to float32 first.
"""

import functools

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def widen(bits):
    """float32 values of bfloat16 ``bits``."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values):
    """Bits of the bfloat16 nearest to each float32, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def is_bfloat16(handle):
    return isinstance(handle, TensorHandle) and handle.dtype.scalar == tl.bfloat16


def repair():
    """Patch the interpreter of this process; a second call does nothing."""
    if hasattr(InterpreterBuilder, "bfloat16_repaired"):
        return
    InterpreterBuilder.bfloat16_repaired = True
    stock_convert = interpreter._convert_float

    def convert(data, source, target, rounding_mode):
        if (source, target) == (tl.bfloat16, tl.float32):
            return widen(data)
        if (source, target) == (tl.float32, tl.bfloat16):
            return narrow(data)
        if tl.bfloat16 in (source, target):
            raise TypeError(f"cast {source} -> {target} in the interpreter: go through float32")
        return stock_convert(data, source, target, rounding_mode)

    stock_dot = InterpreterBuilder.create_dot

    @functools.wraps(stock_dot)
    def dot(self, a, b, *rest):
        # A product of two bfloat16 is exact in float32, and GPUs accumulate in float32.
        a, b = (TensorHandle(widen(x.data), tl.float32) if is_bfloat16(x) else x for x in (a, b))
        return stock_dot(self, a, b, *rest)

    def guarded(operation):
        @functools.wraps(operation)
        def run(self, *operands):
            if any(map(is_bfloat16, operands)):
                raise TypeError(f"{operation.__name__} on bfloat16 in the interpreter: cast to float32 first")
            return operation(self, *operands)

        return run

    interpreter._convert_float = convert
    InterpreterBuilder.create_dot = dot
    for name in ("binary_op", "unary_op", "create_fma"):
        setattr(InterpreterBuilder, name, guarded(getattr(InterpreterBuilder, name)))
