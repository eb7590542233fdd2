"""Attention with the project's Triton kernels, on the blocks where they lie."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.backend import AttentionBackend, AttentionPlan, Scoring, computed_in
from engine.batch import FlatBatch
from engine.decode_inputs import DecodeRows
from engine.float8 import UNSCALED, Scales
from engine.kernels.float8 import FORMATS
from engine.kernels.operands import HALVES, HEAD_DIMS
from engine.kernels.paged_decode import paged_decode
from engine.kernels.paged_prefill import paged_prefill
from engine.kernels.store_kv import store_kv
from engine.kernels.tiles import plan_tiles
from engine.kv_cache import TORCH_DTYPES
from protocol.errors import ConfigError
from protocol.layout import KVLayout


def serves(layout: KVLayout, dtype: torch.dtype | None = None) -> bool:
    """Whether the kernels are made for ``layout``, with queries of ``dtype``, or the cache's own."""
    return layout.head_dim in HEAD_DIMS and not _too_wide(layout, computed_in(layout, dtype))


def _too_wide(layout: KVLayout, dtype: torch.dtype) -> bool:
    return TORCH_DTYPES[layout.dtype] in FORMATS and dtype not in HALVES


class TritonAttention(AttentionBackend):
    """Two kernels a layer: one for the sequences of one token, one for the longer chunks."""

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

    def plan(self, batch: FlatBatch) -> AttentionPlan:
        """The plan of one step."""
        return TritonPlan(self, batch)

    def decode_plan(self, rows: DecodeRows) -> AttentionPlan:
        """See :meth:`AttentionBackend.decode_plan`: the kernels find tables and lengths on the device."""
        return TritonDecodePlan(self, rows)


class TritonPlan(AttentionPlan):
    """A step's block tables and lengths, on the device."""

    def __init__(self, backend: TritonAttention, batch: FlatBatch) -> None:
        super().__init__(backend.order)
        self._kv_heads = backend.kv_heads
        self._slots = torch.from_numpy(batch.slot_mapping).to(backend.device)
        counts = np.diff(batch.query_start_loc)
        chunks, decodes = np.flatnonzero(counts > 1), np.flatnonzero(counts == 1)
        self._chunks = Chunks(batch, chunks, backend.device) if len(chunks) else None
        self._decodes = Decodes(batch, decodes, backend.device) if len(decodes) else None

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
        out = q.new_empty(q.shape)
        chunks, decodes = self._chunks, self._decodes
        if chunks is not None:
            tiles = chunks.tiles(q, q.shape[1] // self._kv_heads)
            paged_prefill(
                *(q, k_cache, v_cache, chunks.block_tables, chunks.query_start, chunks.seq_lens, tiles),
                *(scoring.scale, self.order, out),
                window=scoring.window,
                softcap=scoring.softcap,
                scales=scales,
            )
        if decodes is not None:
            out[decodes.tokens] = paged_decode(
                *(q[decodes.tokens], k_cache, v_cache, decodes.block_tables, decodes.seq_lens),
                *(scoring.scale, self.order),
                window=scoring.window,
                softcap=scoring.softcap,
                scales=scales,
            )
        return out


class Chunks:
    """Sequences with several query tokens each, among all of a batch.

    Attributes:
        block_tables: int32 [B, M], of all sequences.
        query_start: int32 [B + 1], likewise.
        seq_lens: int32 [B], likewise.
    """

    def __init__(self, batch: FlatBatch, rows: NDArray[np.intp], device: torch.device) -> None:
        self._batch = batch
        self._rows = rows
        self._tiles: dict[int, torch.Tensor] = {}
        self.block_tables = torch.from_numpy(batch.block_table).to(device)
        self.query_start = torch.from_numpy(batch.query_start_loc.astype(np.int32)).to(device)
        self.seq_lens = torch.from_numpy(batch.seq_lens).to(device)

    def tiles(self, q: torch.Tensor, group: int) -> torch.Tensor:
        """Their tiles for ``q`` [T, Hq, D]; cut once, for the layers of a model have queries of one shape."""
        found = self._tiles.get(group)
        if found is None:
            batch = self._batch
            cut = plan_tiles(batch.query_start_loc, batch.seq_lens, self._rows, q.dtype, q.shape[2], group)
            found = self._tiles[group] = torch.from_numpy(cut).to(q.device)
        return found


class Decodes:
    """Sequences with one query token each.

    Attributes:
        tokens: int64 [R], where their tokens stand in the batch.
        block_tables: int32 [R, M].
        seq_lens: int32 [R].
    """

    def __init__(self, batch: FlatBatch, rows: NDArray[np.intp], device: torch.device) -> None:
        self.tokens = torch.from_numpy(batch.query_start_loc[rows]).to(device)
        self.block_tables = torch.from_numpy(batch.block_table[rows]).to(device)
        self.seq_lens = torch.from_numpy(batch.seq_lens[rows]).to(device)


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
