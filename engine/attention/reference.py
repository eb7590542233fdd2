"""Attention written for the eye, in float64: the oracle that the other backends are tested against."""

from __future__ import annotations

import torch

from engine.attention.backend import AttentionBackend, AttentionPlan, Scoring, by_token
from engine.batch import FlatBatch
from engine.float8 import UNSCALED, Scales, as_bytes, stored
from protocol.layout import Order


class ReferenceAttention(AttentionBackend):
    """Token by token; slow."""

    def plan(self, batch: FlatBatch) -> AttentionPlan:
        """The plan of one step."""
        return _ReferencePlan(batch, self.order, self.block_size)


class _ReferencePlan(AttentionPlan):
    def __init__(self, batch: FlatBatch, order: Order, block_size: int) -> None:
        super().__init__(order)
        self._batch = batch
        self._block_size = block_size

    def store(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scales: Scales = UNSCALED,
    ) -> None:
        for token, slot in enumerate(self._batch.slot_mapping.tolist()):
            block, offset = divmod(slot, self._block_size)
            for values, cache, scale in ((k, k_cache, scales.k), (v, v_cache, scales.v)):
                by_token(as_bytes(cache), self.order)[block, offset] = stored(values[token], cache.dtype, scale)

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scoring: Scoring,
        scales: Scales = UNSCALED,
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        ends = self._batch.query_start_loc.tolist()
        for row in range(len(ends) - 1):
            for token in range(ends[row], ends[row + 1]):
                length = int(self._batch.positions[token]) + 1
                keys = self._context(k_cache, row, length) * scales.k
                values = self._context(v_cache, row, length) * scales.v
                group = q.shape[1] // keys.shape[1]
                for head in range(q.shape[1]):
                    scores = keys[:, head // group] @ q[token, head].double() * scoring.scale
                    if scoring.softcap:
                        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
                    if scoring.window:
                        scores[: -scoring.window] = -torch.inf
                    out[token, head] = (torch.softmax(scores, 0) @ values[:, head // group]).to(q.dtype)
        return out

    def _context(self, cache: torch.Tensor, row: int, length: int) -> torch.Tensor:
        """K or V of the first ``length`` tokens of a sequence: float64 [length, kv_heads, head_dim]."""
        blocks = self._batch.block_table[row, : -(-length // self._block_size)].tolist()
        return torch.cat([by_token(cache, self.order)[block].double() for block in blocks])[:length]
