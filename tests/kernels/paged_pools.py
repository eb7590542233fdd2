"""Pools for the kernels' cases: block-major, one layer of several, everything that no kernel may read poisoned."""

import itertools
import os

import torch

from engine.kv_cache import TORCH_DTYPES
from protocol.layout import KVLayout

LAYERS, LAYER = 3, 1
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether the cases run in Triton's interpreter, else on the GPU."""
NOWHERE = 1 << 30
"""A block id that nobody may follow."""


def poisoned_pool(num_blocks, kv_heads, head_dim, block_size, dtype, order, device):
    """A pool of NaN, and the views of one layer's K and V that kernels are given."""
    layout = KVLayout(
        num_layers=LAYERS,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=NAMES[dtype],
        order=order,
    )
    pool = torch.full(layout.pool_shape(num_blocks), float("nan"), dtype=dtype, device=device)
    return pool, pool[:, LAYER, 0], pool[:, LAYER, 1]


def combined(*axes):
    """Every combination of the axes' values; half of them in the interpreter, which takes its time.

    Every two values of two axes still meet, where a third axis has two values, or more.
    """
    combinations = itertools.product(*map(enumerate, axes))
    return [
        tuple(value for _, value in chosen)
        for chosen in combinations
        if not INTERPRETED or sum(number for number, _ in chosen) % 2 == 0
    ]


def far_block(tmp_path, device, block_size, kv_heads, head_dim):
    """Three NHD float16 blocks 2**30 elements apart, so that block 2 begins beyond the reach of 32 bits."""
    stride, inner = 1 << 30, block_size * kv_heads * head_dim
    total = 2 * stride + inner
    if device == "cpu":
        path = tmp_path / "sparse"
        storage = torch.from_file(str(path), shared=True, size=total, dtype=torch.float16)
        # Mapped, it lives as long as the tensor; only the touched pages ever exist.
        path.unlink()
    else:
        storage = torch.empty(total, dtype=torch.float16, device=device)
    strides = (stride, kv_heads * head_dim, head_dim, 1)
    return storage.as_strided((3, block_size, kv_heads, head_dim), strides)


def bits(tensor):
    """The tensor's raw bits, so that NaN equals itself."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
