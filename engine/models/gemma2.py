"""Gemma 2 (Riviere et al., 2024): norms around both halves of a layer, windows in turns, and capped scores."""

from __future__ import annotations

import torch

from engine.attention.backend import Angles, AttentionPlan
from engine.kv_cache import KVCache
from engine.models.attention import SelfAttention
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.mlp import GatedMLP
from engine.models.model import Model
from engine.models.norm import CenteredRMSNorm

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


class Layer:
    """Attention and MLP with a norm before and after each; see :class:`engine.models.decoder.Layer`."""

    def __init__(self, config: ModelConfig, index: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._at = f"model.layers.{index}"
        self._attention = SelfAttention(config, index, dtype=dtype, device=device)
        self._mlp = GatedMLP(config, f"{self._at}.mlp", dtype=dtype, device=device)
        self._norms = {name: CenteredRMSNorm(config.hidden_size, config.rms_norm_eps, device=device) for name in _NORMS}

    def destinations(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name to the tensor that it fills."""
        weights = {f"{self._at}.{name}.weight": norm.weight for name, norm in self._norms.items()}
        return weights | self._attention.destinations() | self._mlp.destinations()

    def seal(self) -> None:
        """See :class:`engine.models.decoder.Part`."""
        for norm in self._norms.values():
            norm.seal()
        self._attention.seal()
        self._mlp.seal()

    def __call__(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        angles: Angles,
        plan: AttentionPlan,
        cache: KVCache,
    ) -> torch.Tensor:
        """See :class:`engine.models.decoder.Layer`."""
        before_attention, after_attention, before_mlp, after_mlp = (self._norms[name] for name in _NORMS)
        attended = after_attention(self._attention(before_attention(x, delta), angles, plan, cache))
        return after_mlp(self._mlp(before_mlp(x, attended)))


def build(config: ModelConfig, *, max_model_len: int, dtype: torch.dtype, device: torch.device) -> Model:
    """An empty model; see :class:`engine.models.Build`."""
    return Decoder(
        config,
        [Layer(config, index, dtype=dtype, device=device) for index in range(config.num_layers)],
        CenteredRMSNorm(config.hidden_size, config.rms_norm_eps, device=device),
        max_model_len=max_model_len,
        dtype=dtype,
        device=device,
        embedding_scale=config.hidden_size**0.5,
    )
