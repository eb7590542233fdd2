"""Attention with the project's Triton kernels for stores and decodes; prompt chunks go the way of ``sdpa``."""

from __future__ import annotations

import numpy as np
import torch

from engine.attention.backend import AttentionBackend, AttentionPlan, Scoring, computed_in
from engine.attention.sdpa import Prompt, SDPAttention, prompts
from engine.batch import FlatBatch
from engine.decode_inputs import DecodeRows
from engine.float8 import UNSCALED, Scales
from engine.kernels.float8 import FORMATS
from engine.kernels.operands import HALVES, HEAD_DIMS
from engine.kernels.paged_decode import paged_decode
from engine.kernels.store_kv import store_kv
from engine.kv_cache import TORCH_DTYPES
from protocol.errors import ConfigError
from protocol.layout import KVLayout


def serves(layout: KVLayout, dtype: torch.dtype | None = None) -> bool:
    """Whether the kernels are made for ``layout``, with queries of ``dtype``, or the cache's own."""
    return layout.head_dim in HEAD_DIMS and not _too_wide(layout, computed_in(layout, dtype))


def _too_wide(layout: KVLayout, dtype: torch.dtype) -> bool:
    return TORCH_DTYPES[layout.dtype] in FORMATS and dtype not in HALVES


class TritonAttention(AttentionBackend):
    """Decodes read the blocks where they lie."""

    def __init__(self, layout: KVLayout, device: torch.device, dtype: torch.dtype | None = None) -> None:
        super().__init__(layout, device, dtype)
        if layout.head_dim not in HEAD_DIMS:
            raise ConfigError(
                f"attention 'triton' serves head_dim {HEAD_DIMS}, the model has {layout.head_dim}", field="attention"
            )
        if _too_wide(layout, self.dtype):
            raise ConfigError(
                f"attention 'triton' computes in float16 or bfloat16 over a cache in {layout.dtype}, got {self.dtype}",
                field="attention",
            )
        self.gathering = SDPAttention(layout, device, self.dtype)

    def plan(self, batch: FlatBatch) -> AttentionPlan:
        """The plan of one step."""
        return TritonPlan(self, batch)

    def decode_plan(self, rows: DecodeRows) -> AttentionPlan:
        """See :meth:`AttentionBackend.decode_plan`: the kernels find tables and lengths on the device."""
        return TritonDecodePlan(self, rows)


class TritonPlan(AttentionPlan):
    """The decodes in one kernel, and prompt chunks one by one."""

    def __init__(self, backend: TritonAttention, batch: FlatBatch) -> None:
        super().__init__(backend.order)
        self._backend = backend
        self._batch = batch
        counts = np.diff(batch.query_start_loc)
        rows, device = np.flatnonzero(counts == 1), backend.device
        self._chunks = np.flatnonzero(counts > 1)
        self._slots = torch.from_numpy(batch.slot_mapping).to(device)
        self._tokens = torch.from_numpy(batch.query_start_loc[rows]).to(device)
        self._block_tables = torch.from_numpy(batch.block_table[rows]).to(device)
        self._seq_lens = torch.from_numpy(batch.seq_lens[rows]).to(device)
        self._prompts: dict[Scoring, list[Prompt]] = {}

    def store(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scales: Scales = UNSCALED,
    ) -> None:
        """Write K and V of the step's tokens to their slots."""
        store_kv(k, v, k_cache, v_cache, self._slots, self.order, scales)

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scoring: Scoring,
        scales: Scales = UNSCALED,
    ) -> torch.Tensor:
        """Causal attention of ``q`` [T, Hq, D]: [T, Hq, D]."""
        chunks = self._prompts.get(scoring)
        if chunks is None:
            chunks = prompts(self._backend.gathering, self._batch, self._chunks, scoring)
            self._prompts[scoring] = chunks
        out = q.new_empty(q.shape)
        if self._tokens.numel():
            out[self._tokens] = paged_decode(
                q[self._tokens],
                k_cache,
                v_cache,
                self._block_tables,
                self._seq_lens,
                scoring.scale,
                self.order,
                window=scoring.window,
                softcap=scoring.softcap,
                scales=scales,
            )
        for prompt in chunks:
            out[prompt.tokens] = prompt.attend(q[prompt.tokens], k_cache, v_cache, scales)
        return out


class TritonDecodePlan(AttentionPlan):
    """Decodes alone, whatever stands in their rows: nothing is made on the host."""

    def __init__(self, backend: TritonAttention, rows: DecodeRows) -> None:
        super().__init__(backend.order)
        self._rows = rows

    def store(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scales: Scales = UNSCALED,
    ) -> None:
        """Write K and V of the step's tokens to their slots."""
        store_kv(k, v, k_cache, v_cache, self._rows.slots, self.order, scales)

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scoring: Scoring,
        scales: Scales = UNSCALED,
    ) -> torch.Tensor:
        """Causal attention of ``q`` [B, Hq, D]: [B, Hq, D]."""
        return paged_decode(
            q,
            k_cache,
            v_cache,
            self._rows.block_tables,
            self._rows.seq_lens,
            scoring.scale,
            self.order,
            window=scoring.window,
            softcap=scoring.softcap,
            scales=scales,
        )
