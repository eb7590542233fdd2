"""Scatter new keys and values into the paged cache. Reference: :func:`engine.kernels.reference.store_kv`."""

# Triton itself gives the kernels' parameters their types.
# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.float8 import UNSCALED, Scales, as_bytes
from engine.kernels.float8 import FORMATS, narrowed
from engine.kernels.operands import cache_geometry, check_device, check_operand, computed_in, require
from protocol.layout import Order

NUM_WARPS = 4


@triton.jit
def store_kv_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    k_inverse,
    v_inverse,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_kc_block,
    stride_kc_head,
    stride_kc_token,
    stride_vc_block,
    stride_vc_head,
    stride_vc_token,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """One program stores one token's K and V of all heads; in an eight-bit cache times their inverses."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot >= 0:
        # A pool is larger than 2**31 elements: block * stride is 64-bit.
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        head = tl.arange(0, HEADS_PAD)[:, None]
        dim = tl.arange(0, D_PAD)[None, :]
        inside = (head < HEADS) & (dim < D)
        k = tl.load(k_ptr + token * stride_k_token + head * stride_k_head + dim, mask=inside)
        v = tl.load(v_ptr + token * stride_v_token + head * stride_v_head + dim, mask=inside)
        if FORMAT:
            k = narrowed(k, k_inverse, FORMAT)
            v = narrowed(v, v_inverse, FORMAT)
        k_base = k_cache_ptr + block * stride_kc_block + offset * stride_kc_token
        v_base = v_cache_ptr + block * stride_vc_block + offset * stride_vc_token
        tl.store(k_base + head * stride_kc_head + dim, k, mask=inside)
        tl.store(v_base + head * stride_vc_head + dim, v, mask=inside)


def kernel_constants(kv_heads: int, head_dim: int, block_size: int, eighth: int = 0) -> dict[str, int]:
    """Compile-time arguments of :data:`store_kv_kernel`."""
    return {
        "HEADS": kv_heads,
        "HEADS_PAD": triton.next_power_of_2(kv_heads),
        "D": head_dim,
        "D_PAD": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": block_size,
        "FORMAT": eighth,
    }


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    order: Order,
    scales: Scales = UNSCALED,
) -> None:
    """Write token ``i``'s K and V to slot ``slot_mapping[i]``; a negative slot is skipped.

    Args:
        k: ``[T, kv_heads, head_dim]``, dense in the last dimension.
        v: as ``k``.
        k_cache: one layer's strided view ``[num_blocks, ...]`` of the pool, of the same dtype or an eight-bit one.
        v_cache: as ``k_cache``.
        slot_mapping: int64 ``[T]``, each below ``num_blocks * block_size`` (not checked: that would wait for the GPU).
        order: inner order of the caches.
        scales: of an eight-bit cache.

    Raises:
        ConfigError: order, dtype, head dimension or device is not served.
        EngineFailure: an operand's shape, dtype, device or strides; names it and the value.
    """
    cache = cache_geometry(k_cache, v_cache, order)
    require(k.dim() == 3, "k", "of three dimensions", tuple(k.shape))
    shape = (k.shape[0], cache.kv_heads, cache.head_dim)
    check_operand("k", k, k_cache, shape=shape, dtype=computed_in("k", k, k_cache))
    check_operand("v", v, k_cache, shape=shape, dtype=k.dtype)
    check_operand("slot_mapping", slot_mapping, k_cache, shape=shape[:1], dtype=torch.int64)
    check_device(k_cache, store_kv_kernel)
    if shape[0] == 0:
        return
    store_kv_kernel[(shape[0],)](
        k,
        v,
        as_bytes(k_cache),
        as_bytes(v_cache),
        slot_mapping,
        1.0 / scales.k,
        1.0 / scales.v,
        *k.stride()[:2],
        *v.stride()[:2],
        *cache.k_strides,
        *cache.v_strides,
        **kernel_constants(cache.kv_heads, cache.head_dim, cache.block_size, FORMATS.get(k_cache.dtype, 0)),
        num_warps=NUM_WARPS,
    )
