"""Attention with the project's Triton kernels for stores and decodes; prompt chunks go the way of ``sdpa``."""

from __future__ import annotations

import numpy as np
import torch

from engine.attention.backend import AttentionBackend, AttentionPlan
from engine.attention.sdpa import Prompt, SDPAttention, prompts
from engine.batch import FlatBatch
from engine.kernels.operands import HEAD_DIMS
from engine.kernels.paged_decode import paged_decode
from engine.kernels.store_kv import store_kv
from protocol.errors import ConfigError
from protocol.layout import KVLayout, Order


class TritonAttention(AttentionBackend):
    """Decodes read the blocks where they lie."""

    def __init__(self, layout: KVLayout, device: torch.device) -> None:
        super().__init__(layout, device)
        if layout.head_dim not in HEAD_DIMS:
            raise ConfigError(
                f"attention 'triton' serves head_dim {HEAD_DIMS}, the model has {layout.head_dim}", field="attention"
            )
        self._gathering = SDPAttention(layout, device)

    def plan(self, batch: FlatBatch) -> AttentionPlan:
        """The plan of one step."""
        counts = np.diff(batch.query_start_loc)
        return TritonPlan(
            self.order,
            self.device,
            batch,
            np.flatnonzero(counts == 1),
            prompts(self._gathering, batch, np.flatnonzero(counts > 1)),
        )


class TritonPlan(AttentionPlan):
    """The decodes in one kernel, and prompt chunks one by one."""

    def __init__(
        self,
        order: Order,
        device: torch.device,
        batch: FlatBatch,
        rows: np.ndarray[tuple[int], np.dtype[np.intp]],
        chunks: list[Prompt],
    ) -> None:
        super().__init__(order)
        self._slots = torch.from_numpy(batch.slot_mapping).to(device)
        self._tokens = torch.from_numpy(batch.query_start_loc[rows]).to(device)
        self._block_tables = torch.from_numpy(batch.block_table[rows]).to(device)
        self._seq_lens = torch.from_numpy(batch.seq_lens[rows]).to(device)
        self._prompts = chunks

    def store(self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Write K and V of the step's tokens to their slots."""
        store_kv(k, v, k_cache, v_cache, self._slots, self.order)

    def forward(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float) -> torch.Tensor:
        """Causal attention of ``q`` [T, Hq, D]: [T, Hq, D]."""
        out = q.new_empty(q.shape)
        if self._tokens.numel():
            out[self._tokens] = paged_decode(
                q[self._tokens], k_cache, v_cache, self._block_tables, self._seq_lens, scale, self.order
            )
        for prompt in self._prompts:
            out[prompt.tokens] = prompt.attend(q[prompt.tokens], k_cache, v_cache, scale)
        return out
