"""Phi-3 (Abdin et al., 2024): its checkpoints hold Q, K and V in one tensor, and gate and up in another."""

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
        lambda index: SelfAttention(config, index, dtype=dtype, device=device, one_tensor=True),
        lambda index: GatedMLP(
            config, f"model.layers.{index}.mlp", dtype=dtype, device=device, gate_up=("gate_up_proj",)
        ),
        max_model_len=max_model_len,
        dtype=dtype,
        device=device,
    )
