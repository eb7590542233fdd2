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
    k_tokens, v_tokens = _tokens_first(k_cache.double(), order), _tokens_first(v_cache.double(), order)
    block_size, kv_heads = k_tokens.shape[1], k_tokens.shape[2]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for row, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        blocks = block_tables[row, : -(-length // block_size)].long()
        keys = k_tokens[blocks].flatten(0, 1)[:length] * scales.k
        values = v_tokens[blocks].flatten(0, 1)[:length] * scales.v
        grouped = q[row].double().unflatten(0, (kv_heads, -1))
        scores = torch.einsum("hgd,nhd->hgn", grouped, keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if window:
            scores[..., :-window] = -torch.inf
        weights = torch.softmax(scores, dim=-1)
        out[row] = torch.einsum("hgn,nhd->hgd", weights, values).flatten(0, 1)
    return out


def _tokens_first(cache: torch.Tensor, order: Order) -> torch.Tensor:
    return cache.transpose(1, 2) if order == "HND" else cache
