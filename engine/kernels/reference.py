"""What each kernel computes, in plain torch: the oracle of the kernels' tests. Attention is in float64."""

from __future__ import annotations

import torch

from engine.float8 import UNSCALED, Scales, as_bytes, stored
from protocol.layout import Order


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    order: Order,
    scales: Scales = UNSCALED,
) -> None:
    """As :func:`engine.kernels.store_kv.store_kv`, one token after the other."""
    for values, cache, scale in ((k, k_cache, scales.k), (v, v_cache, scales.v)):
        tokens_first = _tokens_first(as_bytes(cache), order)
        block_size = tokens_first.shape[1]
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                tokens_first[slot // block_size, slot % block_size] = stored(values[token], cache.dtype, scale)


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
    scales: Scales = UNSCALED,
) -> torch.Tensor:
    """As :func:`engine.kernels.paged_decode.paged_decode`, but the result is float64."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for row, length in enumerate(seq_lens.tolist()):
        if length:
            keys = _context(k_cache, block_tables[row], length, order) * scales.k
            values = _context(v_cache, block_tables[row], length, order) * scales.v
            out[row] = _attend(q[row : row + 1], keys, values, scale, window, softcap)[0]
    return out


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    order: Order,
    *,
    window: int = 0,
    softcap: float = 0.0,
    scales: Scales = UNSCALED,
) -> torch.Tensor:
    """As :func:`engine.kernels.paged_prefill.paged_prefill`, of every sequence, but the result is float64."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    starts = query_start.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        own = slice(starts[row], starts[row + 1])
        keys = _context(k_cache, block_tables[row], length, order) * scales.k
        values = _context(v_cache, block_tables[row], length, order) * scales.v
        out[own] = _attend(q[own], keys, values, scale, window, softcap)
    return out


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int, softcap: float
) -> torch.Tensor:
    """[n, heads, head_dim] of ``q``, the last n tokens of a context [L, kv_heads, head_dim]."""
    count, length = q.shape[0], keys.shape[0]
    grouped = q.double().unflatten(1, (keys.shape[1], -1))
    scores = torch.einsum("thgd,nhd->hgtn", grouped, keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = torch.ones(count, length, dtype=torch.bool, device=q.device).tril(length - count)
    if window:
        seen = seen.triu(length - count - window + 1)
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
    # What no query sees weighs nothing, whatever it is: a block before the window may hold NaN.
    values = torch.where(seen.any(0)[:, None, None], values, 0.0)
    return torch.einsum("hgtn,nhd->thgd", weights, values).flatten(1, 2)


def _context(cache: torch.Tensor, table: torch.Tensor, length: int, order: Order) -> torch.Tensor:
    """K or V of a sequence's tokens: float64 [length, kv_heads, head_dim]; zeros where the table leads nowhere."""
    tokens = _tokens_first(cache, order)
    blocks = table[: -(-length // tokens.shape[1])].long()
    found = tokens[blocks.clamp(max=tokens.shape[0] - 1)].double()
    found[blocks >= tokens.shape[0]] = 0.0
    return found.flatten(0, 1)[:length]


def _tokens_first(cache: torch.Tensor, order: Order) -> torch.Tensor:
    return cache.transpose(1, 2) if order == "HND" else cache
