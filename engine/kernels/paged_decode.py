"""Attention of one new token per sequence over its paged context, split over the context.

Flash-decoding (Dao et al., 2023): each program attends to one part of one sequence's context for one KV head and all
the query heads of its group, with the online softmax of FlashAttention (Dao et al., 2022); a second kernel joins the
parts by their log-sum-exp. Reference: :func:`engine.kernels.reference.paged_decode`.
"""

# Triton itself gives the kernels' parameters their types.
# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.float8 import UNSCALED, Scales, as_bytes
from engine.kernels.float8 import FORMATS, widened
from engine.kernels.operands import (
    cache_geometry,
    check_device,
    check_operand,
    check_queries,
    check_scoring,
    require,
)
from engine.kernels.scores import score, score_factors
from protocol.layout import Order

MAX_SPLITS = 32
_PROGRAMS = 512
"""Programs that fill the GPUs this is meant for; splitting further only adds joining."""
_MIN_DOT = 16
"""Fewest rows that tensor cores multiply; a smaller group is padded."""
REDUCE_WARPS = 4


@triton.jit
def paged_decode_split_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    len_ptr,
    part_ptr,
    lse_ptr,
    score_in,
    score_out,
    v_scale,
    window,
    stride_q_row,
    stride_q_head,
    stride_kc_block,
    stride_kc_head,
    stride_kc_token,
    stride_vc_block,
    stride_vc_head,
    stride_vc_token,
    stride_table_row,
    stride_part_row,
    stride_part_head,
    stride_part_split,
    stride_lse_row,
    stride_lse_head,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Grid ``(rows, kv_heads, splits)``; scores are in base 2, as ``exp2`` is the GPU's own. Window 0 sees all.

    Elements of an eight-bit cache (``FORMAT``) are widened; K's scale is in the score's, V's is ``v_scale``.
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(len_ptr + row)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    part = tl.cdiv(tl.cdiv(length - first, tl.num_programs(2)), BLOCK_N) * BLOCK_N
    begin = first + split * part
    end = tl.minimum(begin + part, length)
    group = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, D_PAD)
    in_group = group < GROUP
    in_dim = dim < D
    head = kv_head * GROUP + group
    q_mask = in_group[:, None] & in_dim[None, :]
    q = tl.load(q_ptr + row * stride_q_row + head[:, None] * stride_q_head + dim[None, :], mask=q_mask, other=0.0)
    k_base = k_cache_ptr + kv_head * stride_kc_head
    v_base = v_cache_ptr + kv_head * stride_vc_head
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
    for start in range(begin, end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        seen = token < end
        block = tl.load(table_ptr + row * stride_table_row + token // BLOCK_SIZE, mask=seen, other=0)
        # A pool is larger than 2**31 elements: block * stride is 64-bit.
        block = block.to(tl.int64)
        offset = token % BLOCK_SIZE
        k_at = block * stride_kc_block + offset * stride_kc_token
        k = tl.load(k_base + k_at[None, :] + dim[:, None], mask=seen[None, :] & in_dim[:, None], other=0.0)
        v_at = block * stride_vc_block + offset * stride_vc_token
        v = tl.load(v_base + v_at[:, None] + dim[None, :], mask=seen[:, None] & in_dim[None, :], other=0.0)
        if FORMAT:
            k = widened(k, FORMAT).to(q.dtype)
            v = widened(v, FORMAT).to(q.dtype)
        scores = score(tl.dot(q, k, input_precision="ieee"), score_in, score_out, CAPPED)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top
    # A split with no token has total 0 and log-sum-exp -inf, and weighs nothing when the parts are joined.
    divisor = tl.where(total == 0.0, 1.0, total)
    part_at = part_ptr + row * stride_part_row + split * stride_part_split
    tl.store(part_at + head[:, None] * stride_part_head + dim[None, :], acc / divisor[:, None] * v_scale, mask=q_mask)
    lse_at = lse_ptr + row * stride_lse_row + split
    tl.store(lse_at + head * stride_lse_head, top + tl.log2(divisor), mask=in_group)


@triton.jit
def paged_decode_reduce_kernel(
    part_ptr,
    lse_ptr,
    out_ptr,
    stride_part_row,
    stride_part_head,
    stride_part_split,
    stride_lse_row,
    stride_lse_head,
    stride_out_row,
    stride_out_head,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid ``(rows, heads)``; a row of length 0 gives zeros."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, D_PAD)
    in_dim = dim < D
    lse = tl.load(lse_ptr + row * stride_lse_row + head * stride_lse_head + split)
    top = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights, 0)
    weights = weights / tl.where(total == 0.0, 1.0, total)
    part_at = part_ptr + row * stride_part_row + head * stride_part_head
    part = tl.load(part_at + split[:, None] * stride_part_split + dim[None, :], mask=in_dim[None, :], other=0.0)
    out = tl.sum(part * weights[:, None], 0)
    out_at = out_ptr + row * stride_out_row + head * stride_out_head
    tl.store(out_at + dim, out.to(out_ptr.dtype.element_ty), mask=in_dim)


class Launch(NamedTuple):
    """How the split kernel is launched for one dtype and head dimension."""

    block_n: int
    num_warps: int
    num_stages: int


def launch(dtype: torch.dtype, head_dim: int, eighth: int = 0) -> Launch:
    """Tile and warps that stay within the register budget on every architecture."""
    if dtype == torch.float32:
        # Exact float32 dots run without tensor cores and hold their operands in registers: longer tiles spill on sm_90.
        return Launch(block_n=32 if head_dim <= 64 else 16, num_warps=4, num_stages=2)
    # Elements that are widened pass through registers: longer tiles are over the budget on sm_90.
    return Launch(block_n=64 if head_dim <= (64 if eighth else 128) else 32, num_warps=4, num_stages=2)


def split_constants(
    group: int, head_dim: int, block_size: int, block_n: int, *, capped: bool, eighth: int = 0
) -> dict[str, int]:
    """Compile-time arguments of :data:`paged_decode_split_kernel`."""
    return {
        "GROUP": group,
        "GROUP_PAD": max(_MIN_DOT, triton.next_power_of_2(group)),
        "D": head_dim,
        "D_PAD": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": block_size,
        "BLOCK_N": block_n,
        "CAPPED": capped,
        "FORMAT": eighth,
    }


def reduce_constants(head_dim: int, splits: int) -> dict[str, int]:
    """Compile-time arguments of :data:`paged_decode_reduce_kernel`."""
    return {"D": head_dim, "D_PAD": triton.next_power_of_2(head_dim), "SPLITS": splits}


def choose_splits(rows: int, kv_heads: int, max_tokens: int, block_n: int) -> int:
    """Parts per sequence, a power of two: enough to fill the GPU, none shorter than one tile."""
    wanted = min(-(-_PROGRAMS // (rows * kv_heads)), -(-max_tokens // block_n), MAX_SPLITS)
    return 1 << (max(wanted, 1).bit_length() - 1)


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    order: Order,
    *,
    window: int = 0,
    softcap: float = 0.0,
    splits: int | None = None,
    scales: Scales = UNSCALED,
) -> torch.Tensor:
    """Attention of each row's one query over the first ``seq_lens[row]`` tokens of its block table.

    Args:
        q: ``[B, heads, head_dim]``, dense in the last dimension; heads is a multiple of kv_heads (GQA).
        k_cache: one layer's strided view ``[num_blocks, ...]`` of the pool, of the same dtype or an eight-bit one.
        v_cache: as ``k_cache``.
        block_tables: int32 ``[B, M]``; entries beyond a row's length are not read.
        seq_lens: int32 ``[B]``, each at most ``M * block_size`` (not checked: that would wait for the GPU).
        scale: of the scores, commonly ``head_dim ** -0.5``.
        order: inner order of the caches.
        window: only the last so many tokens of each row are seen; 0 for all.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 leaves them.
        splits: parts per sequence, a power of two up to MAX_SPLITS; None chooses.
        scales: of an eight-bit cache.

    Returns:
        ``[B, heads, head_dim]`` of q's dtype; zeros where the length is 0.

    Raises:
        ConfigError: order, dtype, head dimension or device is not served.
        EngineFailure: an operand's shape, dtype, device or strides; names it and the value.
    """
    cache = cache_geometry(k_cache, v_cache, order)
    heads = check_queries(q, k_cache, cache)
    rows = q.shape[0]
    require(block_tables.dim() == 2, "block_tables", "of two dimensions", tuple(block_tables.shape))
    table_shape = (rows, block_tables.shape[1])
    check_operand("block_tables", block_tables, k_cache, shape=table_shape, dtype=torch.int32)
    check_operand("seq_lens", seq_lens, k_cache, shape=(rows,), dtype=torch.int32)
    check_scoring(scale, window, softcap)
    check_device(k_cache, paged_decode_split_kernel)
    out = torch.empty((rows, heads, cache.head_dim), dtype=q.dtype, device=q.device)
    if rows == 0:
        return out
    eighth = FORMATS.get(k_cache.dtype, 0)
    block_n, num_warps, num_stages = launch(q.dtype, cache.head_dim, eighth)
    scale *= scales.k
    if splits is None:
        longest = table_shape[1] * cache.block_size
        splits = choose_splits(rows, cache.kv_heads, min(longest, window) if window else longest, block_n)
    require(0 < splits <= MAX_SPLITS and splits.bit_count() == 1, "splits", f"a power of two to {MAX_SPLITS}", splits)
    part = torch.empty((rows, heads, splits, cache.head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((rows, heads, splits), dtype=torch.float32, device=q.device)
    paged_decode_split_kernel[(rows, cache.kv_heads, splits)](
        q,
        as_bytes(k_cache),
        as_bytes(v_cache),
        block_tables,
        seq_lens,
        part,
        lse,
        *score_factors(scale, softcap),
        scales.v,
        window,
        *q.stride()[:2],
        *cache.k_strides,
        *cache.v_strides,
        block_tables.stride(0),
        *part.stride()[:3],
        *lse.stride()[:2],
        **split_constants(
            heads // cache.kv_heads,
            cache.head_dim,
            cache.block_size,
            block_n,
            capped=softcap > 0.0,
            eighth=eighth,
        ),
        num_warps=num_warps,
        num_stages=num_stages,
    )
    paged_decode_reduce_kernel[(rows, heads)](
        part,
        lse,
        out,
        *part.stride()[:3],
        *lse.stride()[:2],
        *out.stride()[:2],
        **reduce_constants(cache.head_dim, splits),
        num_warps=REDUCE_WARPS,
    )
    return out
