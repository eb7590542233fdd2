"""The step of a case: a cache full of numbers, scattered block tables, and queries."""

from __future__ import annotations

import numpy as np
import torch

from cluster.bench.attention.case import AttentionCase
from cluster.bench.attention.shape import HeadShape
from engine.attention.backend import AttentionBackend, AttentionPlan, Scoring
from engine.batch import BatchLimits, Chunk, flatten
from engine.kernels import reference
from engine.kv_cache import TORCH_DTYPES, KVCache
from protocol.layout import PADDING_BLOCK, KVLayout


def blocks_of(case: AttentionCase, block_size: int) -> int:
    """Blocks of a pool for the case, block 0 included."""
    return case.batch * -(-case.context // block_size) + PADDING_BLOCK + 1


class Step:
    """One step of a case.

    Args:
        case: which.
        shape: of the heads.
        layout: of the cache; its layers are those that a round goes through.
        device: where it lies.
        scoring: of every layer.
        seed: of numbers and block tables.
    """

    def __init__(
        self,
        case: AttentionCase,
        shape: HeadShape,
        layout: KVLayout,
        device: torch.device,
        scoring: Scoring,
        seed: int,
    ) -> None:
        blocks = blocks_of(case, layout.block_size)
        generator = torch.Generator(device).manual_seed(seed)
        self._case = case
        self._layout = layout
        self._scoring = scoring
        self._cache = KVCache(layout, blocks, device)
        self._cache.tensor.normal_(generator=generator)
        ids = np.random.default_rng(seed).permutation(blocks - 1) + 1
        chunks = [Chunk([0] * case.queries, case.cached, row.tolist()) for row in ids.reshape(case.batch, -1)]
        self._batch = flatten(chunks, BatchLimits(layout.block_size, blocks, 1, case.context))
        size = (case.batch * case.queries, shape.heads, shape.head_dim)
        self._q = torch.randn(size, generator=generator, device=device).to(TORCH_DTYPES[layout.dtype])

    def plan(self, backend: AttentionBackend) -> AttentionPlan:
        """The backend's plan of the step, ready for any number of layers."""
        plan = backend.plan(self._batch)
        self._layer(plan, 0)
        return plan

    def run(self, plan: AttentionPlan) -> None:
        """All layers."""
        for index in range(self._layout.num_layers):
            self._layer(plan, index)

    def error(self, plan: AttentionPlan) -> float:
        """Largest difference to float64, of the first and the last query of each sequence."""
        by_sequence = (self._case.batch, self._case.queries, *self._q.shape[1:])
        found = self._layer(plan, 0).reshape(by_sequence)
        queries = self._q.view(by_sequence)
        tables = torch.from_numpy(self._batch.block_table).to(self._q.device)
        worst = 0.0
        for index, seen in ((0, self._case.cached + 1), (-1, self._case.context)):
            lengths = torch.full((self._case.batch,), seen, dtype=torch.int32, device=self._q.device)
            exact = reference.paged_decode(
                *(queries[:, index], *self._cache.layer(0), tables, lengths, self._scoring.scale, self._layout.order),
                window=self._scoring.window,
                softcap=self._scoring.softcap,
            )
            worst = max(worst, float((found[:, index].double() - exact).abs().max()))
        return worst

    def _layer(self, plan: AttentionPlan, index: int) -> torch.Tensor:
        return plan.forward(self._q, *self._cache.layer(index), self._scoring)
