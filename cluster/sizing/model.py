"""What a model weighs, what its cache takes, and what a step of it must read and multiply."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cluster.bench.attention.case import AttentionCase, Kind
from cluster.bench.attention.shape import HeadShape
from cluster.bench.attention.work import work_of
from cluster.bench.roofline import Work
from engine.models.config import ModelConfig
from protocol.layout import ITEMSIZE, KVLayout


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as it is served on one device.

    Attributes:
        config: its geometry.
        layout: of its cache.
        itemsize: bytes of a weight.
    """

    config: ModelConfig
    layout: KVLayout
    itemsize: int

    @classmethod
    def of(cls, config: ModelConfig, *, dtype: str, cache_dtype: str, block_size: int = 16) -> ServedModel:
        """``config`` with weights of ``dtype`` and a cache of ``cache_dtype``.

        Raises:
            ConfigError: there is no such dtype; names it.
        """
        layout = KVLayout(
            num_layers=config.num_layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            dtype=cache_dtype,  # type: ignore[arg-type]  # KVLayout refuses what is none
        )
        return cls(config, layout, ITEMSIZE[dtype])

    @property
    def _attention(self) -> int:
        config = self.config
        return 2 * config.hidden_size * config.head_dim * (config.num_heads + config.kv_heads)

    @property
    def _mlp(self) -> int:
        return 3 * self.config.hidden_size * self.config.intermediate_size

    @property
    def parameters(self) -> int:
        """Numbers in the checkpoint; of biases and norms the two norms of a layer and the last one."""
        config = self.config
        layer = self._attention + self._mlp * max(config.experts, 1) + config.hidden_size * (config.experts + 2)
        matrices = 1 if config.tied_embeddings else 2
        return config.num_layers * layer + config.hidden_size * (matrices * config.vocab_size + 1)

    @property
    def weight_bytes(self) -> int:
        """Of all weights."""
        return self.parameters * self.itemsize

    @property
    def active_parameters(self) -> int:
        """Weights of the layers that one token is multiplied with."""
        config = self.config
        layer = self._attention + self._mlp * (config.experts_per_token or 1) + config.hidden_size * config.experts
        return config.num_layers * layer

    def request_bytes(self, tokens: int) -> int:
        """KV of a request of so many tokens, in whole blocks."""
        return self.layout.pool_bytes(self.layout.blocks_for(tokens))

    def work(self, *, batch: int = 0, context: int = 0, chunk: int = 0, cached: int = 0) -> tuple[Work, ...]:
        """One step, as what is done one after the other: the products with weights, then attention, layer by layer.

        Args:
            batch: sequences that get a token each.
            context: tokens that each of them sees.
            chunk: tokens of a prompt that are computed beside.
            cached: tokens of that prompt that were computed before.
        """
        tokens, rows = batch + chunk, batch + (chunk > 0)
        config, head = self.config, self.config.hidden_size * self.config.vocab_size
        layer = self._attention + self._mlp * self._experts_read(tokens) + config.hidden_size * config.experts
        products = Work(
            nbytes=int(config.num_layers * layer + head) * self.itemsize,
            flops=2 * (tokens * self.active_parameters + rows * head),
        )
        decodes = self._seen("decode", batch, context, 1)
        return (products, *decodes, *self._seen("prefill", min(chunk, 1), cached + chunk, chunk))

    def _experts_read(self, tokens: int) -> float:
        """Of each layer, how many are expected to be read for so many tokens, each with a choice of its own."""
        if not self.config.experts:
            return 1.0
        unread = (1 - self.config.experts_per_token / self.config.experts) ** tokens
        return self.config.experts * (1 - unread)

    def _seen(self, kind: Kind, batch: int, context: int, queries: int) -> tuple[Work, ...]:
        if not batch:
            return ()
        case = AttentionCase(kind=kind, batch=batch, context=context, queries=queries)
        shape = HeadShape(heads=self.config.num_heads, kv_heads=self.config.kv_heads, head_dim=self.config.head_dim)
        itemsize, windows = self.layout.itemsize, Counter(self.config.windows)
        alike = [(work_of(case, shape, itemsize, window), layers) for window, layers in windows.items()]
        return tuple(Work(nbytes=each.nbytes * layers, flops=each.flops * layers) for each, layers in alike)
