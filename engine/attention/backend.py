"""What a model asks of an attention backend.

Life cycle: one backend per runner; one plan per step, made from the batch and used by every layer of that step. A plan
of decodes that are captured is used by many steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from engine.batch import FlatBatch
from engine.decode_inputs import DecodeRows
from engine.float8 import LARGEST, UNSCALED, Scales, as_bytes, stored
from engine.kv_cache import TORCH_DTYPES
from engine.models.rope import rotate
from protocol.layout import KVLayout, Order

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of a step's tokens, as :meth:`engine.models.rope.RotaryTable.at` gives them."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """How one layer weighs what a token sees.

    Attributes:
        scale: of the scores.
        window: tokens that a token sees, itself included; 0 for all before it.
        softcap: scores are brought to ``softcap * tanh(score / softcap)``; 0 leaves them.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0


class AttentionPlan(ABC):
    """One step's attention: the indices and masks that all layers share.

    Args:
        order: of the cache's blocks.
    """

    def __init__(self, order: Order) -> None:
        self.order: Order = order

    @abstractmethod
    def store(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scales: Scales = UNSCALED,
    ) -> None:
        """Write ``k`` and ``v`` [T, Hkv, D] of the step's tokens to their slots.

        Args:
            k: keys.
            v: values.
            k_cache: [num_blocks, *inner], strided, as :meth:`engine.kv_cache.KVCache.layer` gives it.
            v_cache: like ``k_cache``.
            scales: of the layer's elements.
        """

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        angles: Angles,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scales: Scales = UNSCALED,
    ) -> torch.Tensor:
        """Turn q and k of ``qkv`` [T, Hq + 2 * Hkv, D] by ``angles`` and :meth:`store` k and v; the caller's no more.

        Returns:
            q [T, Hq, D], turned; maybe strided.
        """
        kv_heads = by_token(k_cache, self.order).shape[2]
        heads = qkv.shape[1] - 2 * kv_heads
        turned = rotate(qkv[:, : heads + kv_heads], *angles)
        self.store(turned[:, heads:], qkv[:, heads + kv_heads :], k_cache, v_cache, scales)
        return turned[:, :heads]

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scoring: Scoring,
        scales: Scales = UNSCALED,
    ) -> torch.Tensor:
        """Causal attention of ``q`` [T, Hq, D] over each sequence's own blocks, after :meth:`store`: [T, Hq, D]."""


class AttentionBackend(ABC):
    """Makes plans.

    Args:
        layout: of the cache.
        device: where it and the queries lie.
        dtype: of queries, keys and values; None is the cache's own, which an eight-bit one cannot be.

    Raises:
        ConfigError: this backend does not serve ``layout`` or ``device``.
    """

    def __init__(self, layout: KVLayout, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self.order: Order = layout.order
        self.block_size = layout.block_size
        self.kv_heads = layout.kv_heads
        self.dtype = computed_in(layout, dtype)
        self.device = device

    @abstractmethod
    def plan(self, batch: FlatBatch) -> AttentionPlan:
        """The plan of one step."""

    def decode_plan(self, rows: DecodeRows) -> AttentionPlan | None:
        """The plan of every step whose one token of each sequence stands in ``rows`` by then.

        None where this backend's work depends on more than the shapes of a step, and so cannot be captured.
        """
        return None


def computed_in(layout: KVLayout, dtype: torch.dtype | None) -> torch.dtype:
    """The element type of queries over a cache of ``layout``: ``dtype``, or the cache's own."""
    found = dtype or TORCH_DTYPES[layout.dtype]
    assert found not in LARGEST, "nothing is computed in eight bits"
    return found


def by_token(cache: torch.Tensor, order: Order) -> torch.Tensor:
    """A layer's cache as ``[num_blocks, block_size, kv_heads, head_dim]``, whatever its order; a view."""
    return cache if order == "NHD" else cache.transpose(1, 2)


def put(
    places: tuple[torch.Tensor, torch.Tensor], values: torch.Tensor, cache: torch.Tensor, scale: float, order: Order
) -> None:
    """Write ``values`` [T, Hkv, D] to the blocks and offsets ``places`` [T] of K or V, with torch's own operations."""
    by_token(as_bytes(cache), order).index_put_(places, stored(values, cache.dtype, scale))
