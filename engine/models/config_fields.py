"""Which fields of ``config.json`` an architecture has, and what each of them is where the file does not say.

Both are those of transformers' configuration classes: a file need not repeat what its class assumes, and a class takes
no notice of a field that only another has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COMMON: Mapping[str, Any] = {
    "vocab_size": None,
    "hidden_size": None,
    "intermediate_size": None,
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "partial_rotary_factor": None,
    "original_max_position_embeddings": None,
}
"""Of every architecture; None has no default: it is missing, or follows from others."""

_WINDOW_ASKED_FOR: Mapping[str, Any] = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}

_OWN: Mapping[str, Mapping[str, Any]] = {
    "Gemma2ForCausalLM": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "layer_types": None,
    },
    "LlamaForCausalLM": {"attention_bias": False, "mlp_bias": False},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "MixtralForCausalLM": {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "Phi3ForCausalLM": {
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "original_max_position_embeddings": 4096,
    },
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, **_WINDOW_ASKED_FOR},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False, **_WINDOW_ASKED_FOR},
}
"""Of each architecture, beside the common ones or in their place."""


def fields_of(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """What ``raw``, the content of a ``config.json``, says of the fields that ``architecture`` has, defaults included.

    A null is kept: it says that there is none of something, which a default would not.
    """
    known = {**_COMMON, **_OWN[architecture]}
    return {name: raw.get(name, default) for name, default in known.items()}
