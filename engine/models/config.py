"""The geometry of a decoder-only transformer, read from Hugging Face's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.checkpoint import read_json
from engine.models.fields import count, flag, number
from engine.models.rope_config import RopeConfig
from protocol.errors import CheckpointUnavailable, UnsupportedArchitecture

_QKV_BIAS_ALWAYS = ("Qwen2ForCausalLM",)
"""Architectures with a bias on Q, K and V that their configuration does not mention."""
_WINDOW_ASKED_FOR = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose later layers have the sliding window, and only where ``use_sliding_window`` is set."""
_WINDOW_IN_TURNS = ("Gemma2ForCausalLM",)
"""Architectures whose even layers have the sliding window."""
_TIED_UNLESS_TOLD = ("Gemma2ForCausalLM",)
_EXPERTS = ("MixtralForCausalLM",)

Activation = Literal["silu", "gelu_tanh"]
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


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
        _refuse_unserved(raw)
        num_heads = count(raw, "num_attention_heads")
        kv_heads = count(raw, "num_key_value_heads", num_heads)
        hidden_size = count(raw, "hidden_size")
        head_dim = count(raw, "head_dim", hidden_size // num_heads)
        if num_heads % kv_heads:
            raise CheckpointUnavailable(
                f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads {kv_heads}"
            )
        if head_dim % 2:
            raise CheckpointUnavailable(f"config.json: head_dim must be even, got {head_dim}")
        max_positions = count(raw, "max_position_embeddings")
        rope = RopeConfig.parse(raw, head_dim=head_dim, max_positions=max_positions)
        bias = flag(raw, "attention_bias")
        num_layers = count(raw, "num_hidden_layers")
        experts = count(raw, "num_local_experts") if architecture in _EXPERTS else 0
        return cls(
            architecture=architecture,
            vocab_size=count(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=count(raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope,
            rms_norm_eps=number(raw, "rms_norm_eps", 1e-6),
            tied_embeddings=flag(raw, "tie_word_embeddings", default=architecture in _TIED_UNLESS_TOLD),
            qkv_bias=bias or architecture in _QKV_BIAS_ALWAYS,
            output_bias=bias,
            mlp_bias=flag(raw, "mlp_bias"),
            # Beyond them longrope has other divisors, for whole sequences: what is cached by then would be wrong.
            max_positions=rope.original_positions if rope.type == "longrope" else max_positions,
            activation=_activation(raw),
            windows=_windows(raw, architecture, num_layers),
            attention_scale=number(raw, "query_pre_attn_scalar", head_dim) ** -0.5,
            attention_softcap=_softcap(raw, "attn_logit_softcapping"),
            logits_softcap=_softcap(raw, "final_logit_softcapping"),
            experts=experts,
            experts_per_token=_experts_per_token(raw, experts),
        )


def _refuse_unserved(raw: Mapping[str, Any]) -> None:
    if raw.get("quantization_config") and not _quantises_cache_alone(raw["quantization_config"]):
        raise UnsupportedArchitecture("quantization_config is not supported: the weights must be plain floats")
    if raw.get("pretraining_tp", 1) not in (None, 1):
        raise UnsupportedArchitecture(f"pretraining_tp {raw['pretraining_tp']!r} is not supported, only 1 is")
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


def _activation(raw: Mapping[str, Any]) -> Activation:
    name = raw.get("hidden_activation") or raw.get("hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        raise UnsupportedArchitecture(f"hidden_act {name!r} is not supported, only {', '.join(_ACTIVATIONS)} are")
    return _ACTIVATIONS[name]


def _softcap(raw: Mapping[str, Any], name: str) -> float:
    return 0.0 if raw.get(name) is None else number(raw, name)


def _experts_per_token(raw: Mapping[str, Any], experts: int) -> int:
    if not experts:
        return 0
    chosen = count(raw, "num_experts_per_tok", 2)
    if chosen > experts:
        raise CheckpointUnavailable(
            f"config.json: num_experts_per_tok {chosen} is more than num_local_experts {experts}"
        )
    return chosen


def _windows(raw: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int, ...]:
    asked_for = architecture in _WINDOW_ASKED_FOR
    if not raw.get("sliding_window") or (asked_for and not flag(raw, "use_sliding_window")):
        return (0,) * num_layers
    window = count(raw, "sliding_window")
    types = raw.get("layer_types")
    if types is None:
        first = count(raw, "max_window_layers", 28, least=0) if asked_for else 0
        in_turns = architecture in _WINDOW_IN_TURNS
        return tuple(window if index >= first and not (in_turns and index % 2) else 0 for index in range(num_layers))
    known = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != num_layers:
        raise CheckpointUnavailable(
            f"config.json: layer_types must name each of {num_layers} layers, got {types!r:.80}"
        )
    for name in types:
        if name not in known:
            raise UnsupportedArchitecture(f"layer type {name!r} is not supported, only {', '.join(known)} are")
    return tuple(known[name] for name in types)
