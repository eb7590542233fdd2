"""Mixtral (Jiang et al., 2024): Mistral with a sparse MLP."""

from __future__ import annotations

import torch

from engine.models.attention import SelfAttention
from engine.models.config import ModelConfig
from engine.models.decoder import pre_norm_decoder
from engine.models.experts import SparseExperts
from engine.models.linear import Linear
from engine.models.mlp import GatedMLP
from engine.models.model import Model


def build(config: ModelConfig, *, max_model_len: int, dtype: torch.dtype, device: torch.device) -> Model:
    """An empty model; see :class:`engine.models.Build`."""

    def experts(index: int) -> SparseExperts:
        at = f"model.layers.{index}.block_sparse_moe"
        router = Linear(config.hidden_size, config.experts, bias=False, dtype=dtype, device=device)
        mlps = [
            GatedMLP(config, f"{at}.experts.{number}", dtype=dtype, device=device, gate_up=("w1", "w3"), down="w2")
            for number in range(config.experts)
        ]
        return SparseExperts(router, f"{at}.gate", mlps, config.experts_per_token)

    return pre_norm_decoder(
        config,
        lambda index: SelfAttention(config, index, dtype=dtype, device=device),
        experts,
        max_model_len=max_model_len,
        dtype=dtype,
        device=device,
        captures=False,  # which experts are computed depends on the tokens
    )
