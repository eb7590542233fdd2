"""The geometry of a decoder-only transformer, read from Hugging Face's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint import read_json
from protocol.errors import CheckpointUnavailable, UnsupportedArchitecture

_MAX_DIMENSION = 1 << 24
_QKV_BIAS_ALWAYS = ("Qwen2ForCausalLM",)
"""Architectures with a bias on Q, K and V that their configuration does not mention."""
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021), and how it is stretched to longer contexts.

    Attributes:
        type: default, linear (positions divided by ``factor``) or llama3 (only low frequencies are).
        theta: base of the wavelengths.
        factor: stretch; 1 for default.
        low_freq_factor, high_freq_factor, original_positions: llama3's borders between the frequencies.
    """

    type: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_positions: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry of a model.

    Attributes:
        architecture: the name it is registered under.
        vocab_size, hidden_size, intermediate_size, num_layers: as named.
        num_heads, kv_heads: query heads, and KV heads that groups of them share (GQA, Ainslie et al., 2023).
        head_dim: elements per head; not always ``hidden_size / num_heads``.
        rope: position embedding.
        rms_norm_eps: of the norms.
        tied_embeddings: whether the output projection is the embedding matrix.
        qkv_bias, output_bias, mlp_bias: which linears have a bias.
        max_positions: tokens of one sequence at most.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig
    rms_norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    max_positions: int

    @classmethod
    def read(cls, directory: Path) -> ModelConfig:
        """The geometry of the model in ``directory``.

        Raises:
            CheckpointUnavailable: ``config.json`` is missing, or a value in it is missing or out of range; names it.
            UnsupportedArchitecture: it asks for something no registered family does; names it.
        """
        return cls.parse(read_json(directory, "config.json"))

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """The geometry that ``raw``, the content of a ``config.json``, describes; raises as :meth:`read`."""
        architectures = raw.get("architectures")
        if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
            raise CheckpointUnavailable(f"config.json: architectures must name one, got {architectures!r}")
        architecture = architectures[0]
        _refuse_unserved(raw)
        num_heads = _count(raw, "num_attention_heads")
        kv_heads = _count(raw, "num_key_value_heads", num_heads)
        hidden_size = _count(raw, "hidden_size")
        head_dim = _count(raw, "head_dim", hidden_size // num_heads)
        if num_heads % kv_heads:
            raise CheckpointUnavailable(
                f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads {kv_heads}"
            )
        if head_dim % 2:
            raise CheckpointUnavailable(f"config.json: head_dim must be even, got {head_dim}")
        max_positions = _count(raw, "max_position_embeddings")
        bias = _flag(raw, "attention_bias")
        return cls(
            architecture=architecture,
            vocab_size=_count(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_count(raw, "intermediate_size"),
            num_layers=_count(raw, "num_hidden_layers"),
            num_heads=num_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=_rope(raw, max_positions),
            rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
            tied_embeddings=_flag(raw, "tie_word_embeddings"),
            qkv_bias=bias or architecture in _QKV_BIAS_ALWAYS,
            output_bias=bias,
            mlp_bias=_flag(raw, "mlp_bias"),
            max_positions=max_positions,
        )


def _refuse_unserved(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedArchitecture(f"hidden_act {raw['hidden_act']!r} is not supported, only 'silu' is")
    if raw.get("quantization_config"):
        raise UnsupportedArchitecture("quantization_config is not supported: the weights must be plain floats")
    if raw.get("sliding_window") and raw.get("use_sliding_window", True):
        raise UnsupportedArchitecture(f"sliding_window {raw['sliding_window']!r} is not supported, only full attention")
    if raw.get("pretraining_tp", 1) not in (None, 1):
        raise UnsupportedArchitecture(f"pretraining_tp {raw['pretraining_tp']!r} is not supported, only 1 is")


def _rope(raw: Mapping[str, Any], max_positions: int) -> RopeConfig:
    # transformers 5 writes one rope_parameters; earlier releases wrote rope_theta and, where stretched, rope_scaling.
    values = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(values, dict):
        raise CheckpointUnavailable(f"config.json: rope parameters must be an object, got {values!r}")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise UnsupportedArchitecture(f"rope type {kind!r} is not supported, only {', '.join(ROPE_TYPES)} are")
    partial = values.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise UnsupportedArchitecture(f"partial_rotary_factor {partial!r} is not supported, only 1 is")
    theta = _number(values, "rope_theta", _number(raw, "rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(kind, theta)
    factor = _number(values, "factor")
    if kind == "linear":
        return RopeConfig(kind, theta, factor)
    low, high = _number(values, "low_freq_factor"), _number(values, "high_freq_factor")
    if high <= low:
        raise CheckpointUnavailable(f"config.json: high_freq_factor {high} must be above low_freq_factor {low}")
    return RopeConfig(
        kind,
        theta,
        factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_positions=_count(values, "original_max_position_embeddings", max_positions),
    )


def _count(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    value = default if value is None else value
    if type(value) is not int or not 1 <= value <= _MAX_DIMENSION:
        raise CheckpointUnavailable(f"config.json: {name} must be in [1, {_MAX_DIMENSION}], got {value!r}")
    return value


def _number(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < 1e30:
        raise CheckpointUnavailable(f"config.json: {name} must be a positive number, got {value!r}")
    return float(value)


def _flag(raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise CheckpointUnavailable(f"config.json: {name} must be true or false, got {value!r}")
    return bool(value)
