"""Random-weight models of every family: each axis that a family has, and what is drawn of them at random."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

FAMILIES = ("gemma2", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3")
HEAD_DIMS = (64, 80, 96, 128, 256)
"""Those of real models, and of the kernels."""
HEADS = ((4, 4), (4, 1), (4, 2), (6, 2), (5, 1), (7, 1), (8, 2))
"""Query and KV heads: MHA, MQA, GQA, and groups that are no power of two."""
POSITIONS = 512
_THETA = {"rope_theta": 1000.0}
STRETCHES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
)
"""How positions are stretched, in all families but Phi-3, which has a way of its own."""


def stretch(family: str, head_dim: int, choice: int) -> dict[str, Any]:
    """The ``choice``-th kind of rope that a family has."""
    if family != "phi3":
        return {"rope_parameters": _THETA | STRETCHES[choice % len(STRETCHES)]}
    kind, fraction = divmod(choice % 4, 2)
    part = (1.0, 0.75)[fraction] if head_dim % 8 == 0 else 1.0
    if not kind:
        return {"rope_parameters": {**_THETA, "rope_type": "default", "partial_rotary_factor": part}}
    pairs = int(head_dim * part) // 2
    values = {
        "rope_type": "longrope",
        "partial_rotary_factor": part,
        "short_factor": [1.0 + pair / pairs for pair in range(pairs)],
        "long_factor": [8.0] * pairs,
        "original_max_position_embeddings": 256,
    }
    return {"rope_parameters": _THETA | values, "original_max_position_embeddings": 256}


def shape(family: str, heads: tuple[int, int], head_dim: int) -> dict[str, Any]:
    """Heads of a family; where it has no field for their size, the hidden size is what follows from it."""
    query, kv = heads
    found: dict[str, Any] = {"num_attention_heads": query, "num_key_value_heads": kv, "hidden_size": 16 * query}
    if family in ("phi3", "qwen2"):
        return found | {"hidden_size": head_dim * query}
    return found | {"head_dim": head_dim}


def extras(family: str, choice: int) -> dict[str, Any]:
    """What only some families have, in two forms."""
    odd = bool(choice % 2)
    match family:
        case "gemma2":
            caps = {"attn_logit_softcapping": 0.8, "final_logit_softcapping": 6.0} if odd else {}
            return {"sliding_window": 21, "query_pre_attn_scalar": 5, "num_hidden_layers": 3, **caps}
        case "llama":
            return {"attention_bias": odd, "mlp_bias": odd}
        case "mistral":
            return {"sliding_window": 17 if odd else None}
        case "mixtral":
            return {"num_local_experts": 3 + choice % 3, "num_experts_per_tok": 1 + choice % 3}
        case "phi3":
            return {"sliding_window": 19 if odd else None}
        case _:
            bias = {"attention_bias": odd} if family == "qwen3" else {}
            window = {"use_sliding_window": True, "sliding_window": 15, "max_window_layers": 1}
            return {**bias, **(window if odd else {})}


def case(family: str, heads: tuple[int, int], head_dim: int, choice: int) -> dict[str, Any]:
    """Arguments of :func:`checkpoints.tiny_model`; ``choice`` picks of everything else."""
    return {
        "family": family,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": bool(choice // 2 % 2),
        **shape(family, heads, head_dim),
        **stretch(family, head_dim, choice),
        **extras(family, choice),
    }


def grid() -> dict[str, dict[str, Any]]:
    """Every head size of every family, with the heads and the choices in turns."""
    found = {}
    number = 0
    for family in FAMILIES:
        for head_dim in HEAD_DIMS:
            heads = HEADS[number % len(HEADS)]
            found[f"{family}-{head_dim}-{heads[0]}x{heads[1]}-{number}"] = case(family, heads, head_dim, number)
            number += 1
    return found


def cases() -> st.SearchStrategy[dict[str, Any]]:
    """Any of a family, of heads, and of what it has beside."""
    return st.builds(
        case, st.sampled_from(FAMILIES), st.sampled_from(HEADS), st.sampled_from((16, *HEAD_DIMS)), st.integers(0, 23)
    )
