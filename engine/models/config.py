"""The geometry of a decoder-only transformer, read from Hugging Face's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.checkpoint import read_json
from engine.models import family
from engine.models.config_fields import fields_of
from engine.models.fields import count, flag, number
from engine.models.rope_config import RopeConfig
from protocol.errors import CheckpointUnavailable, UnsupportedArchitecture

_QKV_BIAS_ALWAYS = ("Qwen2ForCausalLM",)
"""Architectures with a bias on Q, K and V that no field mentions."""
_TURNED_IN_PART = ("Phi3ForCausalLM",)
"""Architectures whose heads may be turned in part; in others transformers turns them whole whatever is written."""

Activation = Literal["silu", "gelu_tanh"]
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_LAYER_TYPES = ("full_attention", "sliding_attention")


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
        activation: of the gate.
        windows: of each layer: tokens that a token sees, itself included (Beltagy et al., 2020); 0 for all.
        attention_scale: of the scores.
        attention_softcap, logits_softcap: ``c * tanh(x / c)`` of scores and of logits; 0 for none.
        experts, experts_per_token: of a sparse MLP (Shazeer et al., 2017); 0 where it is dense.
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
    activation: Activation
    windows: tuple[int, ...]
    attention_scale: float
    attention_softcap: float
    logits_softcap: float
    experts: int
    experts_per_token: int

    @property
    def reach(self) -> int:
        """Tokens that a token sees at most, itself included, in the layer that sees most; 0 where one sees all."""
        return max(self.windows) if all(self.windows) else 0

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
        family(architecture)
        _refuse_unserved(raw)
        fields = fields_of(raw, architecture)
        num_heads = count(fields, "num_attention_heads")
        kv_heads = count(fields, "num_key_value_heads", num_heads)
        hidden_size = count(fields, "hidden_size")
        head_dim = count(fields, "head_dim", hidden_size // num_heads)
        if num_heads % kv_heads:
            raise CheckpointUnavailable(
                f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads {kv_heads}"
            )
        if head_dim % 2:
            raise CheckpointUnavailable(f"config.json: head_dim must be even, got {head_dim}")
        max_positions = count(fields, "max_position_embeddings")
        rope = RopeConfig.parse(fields, head_dim=head_dim, max_positions=max_positions)
        if rope.rotary_dim < head_dim and architecture not in _TURNED_IN_PART:
            raise UnsupportedArchitecture(f"partial_rotary_factor is not supported for {architecture}, only 1 is")
        bias = flag(fields, "attention_bias")
        num_layers = count(fields, "num_hidden_layers")
        windows = _windows(fields, num_layers)
        if "layer_types" not in fields:
            _check_layer_types(raw, architecture, windows)
        experts = count(fields, "num_local_experts") if "num_local_experts" in fields else 0
        return cls(
            architecture=architecture,
            vocab_size=count(fields, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=count(fields, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope,
            rms_norm_eps=number(fields, "rms_norm_eps"),
            tied_embeddings=flag(fields, "tie_word_embeddings"),
            qkv_bias=bias or architecture in _QKV_BIAS_ALWAYS,
            output_bias=bias,
            mlp_bias=flag(fields, "mlp_bias"),
            max_positions=_reach(rope, max_positions),
            activation=_activation(fields),
            windows=windows,
            attention_scale=number(fields, "query_pre_attn_scalar", head_dim) ** -0.5,
            attention_softcap=_softcap(fields, "attn_logit_softcapping"),
            logits_softcap=_softcap(fields, "final_logit_softcapping"),
            experts=experts,
            experts_per_token=_experts_per_token(fields, experts),
        )


def _reach(rope: RopeConfig, max_positions: int) -> int:
    """Positions that are served, of a model that names ``max_positions``."""
    if rope.type == "longrope":
        # Beyond them it has other divisors, for whole sequences: what is cached by then would be wrong.
        return min(rope.original_positions, max_positions)
    if rope.type == "yarn":
        # Published configurations name what the model was trained on before it was stretched, or after.
        return max(int(rope.original_positions * rope.factor), max_positions)
    return max_positions


def _refuse_unserved(raw: Mapping[str, Any]) -> None:
    for name in ("quantization_config", "compression_config"):
        if raw.get(name) and not _quantises_cache_alone(raw[name]):
            raise UnsupportedArchitecture(f"{name} is not supported: the weights must be plain floats")
    if raw.get("per_layer_config"):
        raise UnsupportedArchitecture("per_layer_config is not supported: all layers must have one geometry")
    if raw.get("use_bidirectional_attention"):
        raise UnsupportedArchitecture("use_bidirectional_attention is not supported: attention is causal")


def _quantises_cache_alone(quantization: Any) -> bool:
    """Whether the weights are plain, and the checkpoint has but a scale for K and for V of each layer."""
    if not isinstance(quantization, dict) or quantization.get("config_groups"):
        return False
    scheme = quantization.get("kv_cache_scheme")
    wanted = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    return (
        quantization.get("quant_method") == "compressed-tensors"
        and isinstance(scheme, dict)
        and all(scheme.get(name) == value for name, value in wanted.items())
        and bool(scheme.get("symmetric", True))
    )


def _check_layer_types(raw: Mapping[str, Any], architecture: str, windows: tuple[int, ...]) -> None:
    """Where the architecture has no such field: what it says must be what the architecture does."""
    types = raw.get("layer_types")
    if types is not None and types != [_LAYER_TYPES[window > 0] for window in windows]:
        raise UnsupportedArchitecture(f"layer_types {types!r:.200} are not supported: {architecture} has no such field")


def _activation(fields: Mapping[str, Any]) -> Activation:
    field = "hidden_activation" if "hidden_activation" in fields else "hidden_act"
    name = fields[field]
    if name not in _ACTIVATIONS:
        raise UnsupportedArchitecture(f"{field} {name!r} is not supported, only {', '.join(_ACTIVATIONS)} are")
    return _ACTIVATIONS[name]


def _softcap(fields: Mapping[str, Any], name: str) -> float:
    return 0.0 if fields.get(name) is None else number(fields, name)


def _experts_per_token(fields: Mapping[str, Any], experts: int) -> int:
    if not experts:
        return 0
    chosen = count(fields, "num_experts_per_tok")
    if chosen > experts:
        raise CheckpointUnavailable(
            f"config.json: num_experts_per_tok {chosen} is more than num_local_experts {experts}"
        )
    return chosen


def _windows(fields: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    asked_for = "use_sliding_window" in fields
    if not fields.get("sliding_window") or (asked_for and not flag(fields, "use_sliding_window")):
        return (0,) * num_layers
    window = count(fields, "sliding_window")
    types = fields.get("layer_types")
    if types is None:
        first = count(fields, "max_window_layers", least=0) if asked_for else 0
        in_turns = "layer_types" in fields and not asked_for
        return tuple(window if index >= first and not (in_turns and index % 2) else 0 for index in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise CheckpointUnavailable(
            f"config.json: layer_types must name each of {num_layers} layers, got {types!r:.80}"
        )
    for name in types:
        if name not in _LAYER_TYPES:
            raise UnsupportedArchitecture(f"layer type {name!r} is not supported, only {', '.join(_LAYER_TYPES)} are")
    return tuple(window * _LAYER_TYPES.index(name) for name in types)
