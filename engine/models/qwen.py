"""Qwen2 and 2.5 (Yang et al., 2024), with biases on Q, K and V; Qwen3 (2025), with a norm on each head of Q and K."""

from __future__ import annotations

import torch

from engine.models.attention import SelfAttention
from engine.models.config import ModelConfig
from engine.models.decoder import pre_norm_decoder
from engine.models.mlp import GatedMLP
from engine.models.model import Model


def build(config: ModelConfig, *, max_model_len: int, dtype: torch.dtype, device: torch.device) -> Model:
    """An empty model; see :class:`engine.models.Build`."""
    return pre_norm_decoder(
        config,
        lambda index: SelfAttention(
            config, index, dtype=dtype, device=device, head_norms=config.architecture == "Qwen3ForCausalLM"
        ),
        lambda index: GatedMLP(config, f"model.layers.{index}.mlp", dtype=dtype, device=device),
        max_model_len=max_model_len,
        dtype=dtype,
        device=device,
    )
