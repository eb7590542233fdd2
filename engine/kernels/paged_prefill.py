"""Attention of packed prompt chunks, each over its paged context and itself.

FlashAttention-2 (Dao, 2023) over block tables: a program holds a tile of queries, some tokens of one sequence by all
the query heads of one KV head, and folds the keys that they see into an online softmax. So each key is read once for
the whole group, whatever its size. Keys that every query of the tile sees take a loop of their own, without masks.
Reference: :func:`engine.kernels.reference.paged_prefill`.
"""

# Triton itself gives the kernels' parameters their types.
# mypy: allow-incomplete-defs

from __future__ import annotations

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
from engine.kernels.tiles import EDGE_STAGES, launch, tile_constants
from protocol.layout import Order


@triton.jit
def _fold_keys(
    acc,
    total,
    top,
    q,
    start,
    end,
    position,
    window,
    table_at,
    k_base,
    v_base,
    score_in,
    score_out,
    stride_kc_block,
    stride_kc_token,
    stride_vc_block,
    stride_vc_token,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr,
    FORMAT: tl.constexpr,
    EDGE: tl.constexpr,
):
    """One step of the online softmax over keys ``start`` to ``start + BLOCK_N``; at an EDGE some are not for all."""
    token = start + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, D_PAD)
    k_mask = dim[:, None] < D
    v_mask = dim[None, :] < D
    if EDGE:
        k_mask = k_mask & (token < end)[None, :]
        v_mask = v_mask & (token < end)[:, None]
        block = tl.load(table_at + token // BLOCK_SIZE, mask=token < end, other=0)
    else:
        block = tl.load(table_at + token // BLOCK_SIZE)
    # A pool is larger than 2**31 elements: block * stride is 64-bit.
    block = block.to(tl.int64)
    offset = token % BLOCK_SIZE
    k_at = block * stride_kc_block + offset * stride_kc_token
    k = tl.load(k_base + k_at[None, :] + dim[:, None], mask=k_mask, other=0.0)
    v_at = block * stride_vc_block + offset * stride_vc_token
    v = tl.load(v_base + v_at[:, None] + dim[None, :], mask=v_mask, other=0.0)
    if FORMAT:
        k = widened(k, FORMAT).to(q.dtype)
        v = widened(v, FORMAT).to(q.dtype)
    scores = score(tl.dot(q, k, input_precision="ieee"), score_in, score_out, CAPPED)
    if EDGE:
        seen = token[None, :] <= position[:, None]
        seen = seen & ((window == 0) | (token[None, :] > position[:, None] - window))
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A query may have seen nothing yet: its window begins in a later step.
    level = tl.where(new_top == float("-inf"), 0.0, new_top) if EDGE else new_top
    weights = tl.exp2(scores - level[:, None])
    shrink = tl.exp2(top - level)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return acc, total, new_top


@triton.jit
def paged_prefill_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    query_start_ptr,
    len_ptr,
    tile_ptr,
    out_ptr,
    score_in,
    score_out,
    v_scale,
    window,
    stride_q_token,
    stride_q_head,
    stride_kc_block,
    stride_kc_head,
    stride_kc_token,
    stride_vc_block,
    stride_vc_head,
    stride_vc_token,
    stride_table_row,
    stride_out_token,
    stride_out_head,
    GROUP: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    CAPPED: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Grid ``(tiles, kv_heads)``; row r of a tile is its token ``r // GROUP`` by head ``r % GROUP`` of the group.

    Elements of an eight-bit cache (``FORMAT``) are widened; K's scale is in the score's, V's is ``v_scale``.
    """
    kv_head = tl.program_id(1).to(tl.int64)
    row = tl.load(tile_ptr + 2 * tl.program_id(0)).to(tl.int64)
    first = tl.load(tile_ptr + 2 * tl.program_id(0) + 1)
    chunk = tl.load(query_start_ptr + row)
    count = tl.load(query_start_ptr + row + 1) - chunk
    cached = tl.load(len_ptr + row) - count
    lowest = cached + first
    end = cached + tl.minimum(first + TILE_TOKENS, count)

    index = tl.arange(0, BLOCK_M)
    token = first + index // GROUP
    head = kv_head * GROUP + index % GROUP
    dim = tl.arange(0, D_PAD)
    in_tile = (index < TILE_TOKENS * GROUP) & (token < count)
    mask = in_tile[:, None] & (dim < D)[None, :]
    at = (chunk + token).to(tl.int64)
    q_at = q_ptr + (at * stride_q_token + head * stride_q_head)[:, None] + dim[None, :]
    q = tl.load(q_at, mask=mask, other=0.0)
    position = cached + token

    table_at = table_ptr + row * stride_table_row
    k_base = k_cache_ptr + kv_head * stride_kc_head
    v_base = v_cache_ptr + kv_head * stride_vc_head
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)

    # Before `begin` no query sees; from `begin` some do, from `whole` on all, and from `tail` on again some.
    begin = tl.where(window > 0, tl.maximum(lowest + 1 - window, 0), 0)
    left = tl.where(window > 0, tl.cdiv(tl.maximum(end - window, 0) - begin, BLOCK_N), 0)
    whole = begin + left * BLOCK_N
    tail = whole + tl.maximum(lowest + 1 - whole, 0) // BLOCK_N * BLOCK_N
    right = tl.cdiv(tl.maximum(end - tail, 0), BLOCK_N)
    for start in tl.range(whole, tail, BLOCK_N, num_stages=STAGES):
        acc, total, top = _fold_keys(
            acc,
            total,
            top,
            q,
            start,
            end,
            position,
            window,
            table_at,
            k_base,
            v_base,
            score_in,
            score_out,
            stride_kc_block,
            stride_kc_token,
            stride_vc_block,
            stride_vc_token,
            D,
            D_PAD,
            BLOCK_SIZE,
            BLOCK_N,
            CAPPED,
            FORMAT,
            False,
        )
    for step in range(left + right):
        start = tl.where(step < left, begin + step * BLOCK_N, tail + (step - left) * BLOCK_N)
        acc, total, top = _fold_keys(
            acc,
            total,
            top,
            q,
            start,
            end,
            position,
            window,
            table_at,
            k_base,
            v_base,
            score_in,
            score_out,
            stride_kc_block,
            stride_kc_token,
            stride_vc_block,
            stride_vc_token,
            D,
            D_PAD,
            BLOCK_SIZE,
            BLOCK_N,
            CAPPED,
            FORMAT,
            True,
        )

    # Rows beyond the chunk may have seen nothing; they are not stored.
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None] * v_scale
    out_at = out_ptr + (at * stride_out_token + head * stride_out_head)[:, None] + dim[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask)


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    order: Order,
    out: torch.Tensor,
    *,
    window: int = 0,
    softcap: float = 0.0,
    scales: Scales = UNSCALED,
) -> None:
    """Causal attention of each chunk's queries over its sequence's blocks, in which its own K and V are already.

    Args:
        q: ``[T, heads, head_dim]``, the chunks end to end, dense in the last dimension; heads is a multiple of kv_heads
            (GQA).
        k_cache: one layer's strided view ``[num_blocks, ...]`` of the pool, of the same dtype or an
            eight-bit one.
        v_cache: as ``k_cache``.
        block_tables: int32 ``[B, M]``; entries beyond a sequence's length, and those before every window, are not read.
        query_start: int32 ``[B + 1]``; sequence ``b`` owns tokens ``query_start[b]:query_start[b + 1]`` of q.
        seq_lens: int32 ``[B]``, tokens of each sequence up to the last of its chunk, at most ``M * block_size`` (not
            checked, nor is ``query_start``: that would wait for the GPU).
        tiles: int32 ``[N, 2]``, as :func:`engine.kernels.tiles.plan_tiles` makes them for these lengths.
        scale: of the scores, commonly ``head_dim ** -0.5``.
        order: inner order of the caches.
        out: as ``q``, maybe of other strides; only tokens of ``tiles`` are written.
        window: tokens that a query sees, its own included; 0 for all before it.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 leaves them.
        scales: of an eight-bit cache.

    Raises:
        ConfigError: order, dtype, head dimension or device is not served.
        EngineFailure: an operand's shape, dtype, device or strides; names it and the value.
    """
    cache = cache_geometry(k_cache, v_cache, order)
    heads = check_queries(q, k_cache, cache)
    require(block_tables.dim() == 2, "block_tables", "of two dimensions", tuple(block_tables.shape))
    rows = block_tables.shape[0]
    check_operand("block_tables", block_tables, k_cache, shape=(rows, block_tables.shape[1]), dtype=torch.int32)
    check_operand("query_start", query_start, k_cache, shape=(rows + 1,), dtype=torch.int32)
    check_operand("seq_lens", seq_lens, k_cache, shape=(rows,), dtype=torch.int32)
    check_operand("tiles", tiles, k_cache, shape=(tiles.shape[0], 2), dtype=torch.int32)
    require(tiles.is_contiguous(), "tiles", "contiguous", tiles.stride())
    check_operand("out", out, k_cache, shape=tuple(q.shape), dtype=q.dtype)
    check_scoring(scale, window, softcap)
    check_device(k_cache, paged_prefill_kernel)
    if tiles.shape[0] == 0:
        return
    group = heads // cache.kv_heads
    eighth = FORMATS.get(k_cache.dtype, 0)
    launched = launch(q.dtype, cache.head_dim, group, eighth)
    paged_prefill_kernel[(tiles.shape[0], cache.kv_heads)](
        q,
        as_bytes(k_cache),
        as_bytes(v_cache),
        block_tables,
        query_start,
        seq_lens,
        tiles,
        out,
        *score_factors(scale * scales.k, softcap),
        scales.v,
        window,
        *q.stride()[:2],
        *cache.k_strides,
        *cache.v_strides,
        block_tables.stride(0),
        *out.stride()[:2],
        **tile_constants(launched, group, cache.head_dim, cache.block_size, capped=softcap > 0.0, eighth=eighth),
        num_warps=launched.num_warps,
        num_stages=EDGE_STAGES,
    )
