"""A configuration means what transformers' own class takes it to mean, whatever it says and leaves out."""

from __future__ import annotations

import dataclasses
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedConfig

from engine.batch import Chunk
from engine.config import EngineConfig
from engine.models import architectures
from engine.models.config import ModelConfig
from engine.models.config_fields import fields_of
from engine.models.rope import inverse_frequencies
from engine.runner import ModelRunner
from protocol.sampling import SamplingParams

FAMILIES = {
    "Gemma2ForCausalLM": "gemma2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
HARMLESS = {
    # for training
    *("initializer_range", "attention_dropout", "resid_pdrop", "embd_pdrop"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    # how the same products were once split up
    "pretraining_tp",
    # the caller's business
    *("use_cache", "pad_token_id", "bos_token_id", "eos_token_id"),
}
REFUSED = {"use_bidirectional_attention"}
GEOMETRY = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
}
"""What a file must say: no model is of the size that a class happens to assume."""


def classes(architecture: str) -> tuple[Any, Any]:
    """transformers' configuration and rotary embedding of an architecture."""
    family = FAMILIES[architecture]
    found = import_module(f"transformers.models.{family}")
    stem = architecture.removesuffix("ForCausalLM")
    return getattr(found, f"{stem}Config"), getattr(
        import_module(f"transformers.models.{family}.modeling_{family}"), f"{stem}RotaryEmbedding"
    )


def test_every_architecture_is_compared() -> None:
    assert sorted(FAMILIES) == architectures()


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_field_of_the_class_is_known_with_its_default(architecture: str) -> None:
    config_class, _ = classes(architecture)
    base = {field.name for field in dataclasses.fields(PreTrainedConfig)} - {"tie_word_embeddings"}
    theirs = {field.name: field.default for field in dataclasses.fields(config_class) if field.name not in base}
    ours = fields_of({}, architecture)
    for name, default in theirs.items():
        if name in HARMLESS | REFUSED:
            assert name not in ours
        elif name not in GEOMETRY:
            assert ours[name] == default, name
    assert ours["rope_theta"] == config_class.default_theta
    # What is no field of the class is of older files, or read by its model if it is there at all; or it is Gemma's,
    # which says hidden_activation and for which hidden_act means nothing.
    assert set(ours) - set(theirs) <= {
        *("rope_scaling", "rope_theta", "partial_rotary_factor"),
        *("head_dim", "original_max_position_embeddings", "hidden_act"),
    }


HEADS = st.sampled_from([(4, 4), (4, 2), (6, 2), (8, 1)])
THETA = st.sampled_from([500.0, 10000.0, 1e6])
FACTOR = st.sampled_from([1.0, 2.0, 3.0, 8.0])
STRETCHES: dict[str, Any] = {
    "default": st.fixed_dictionaries({}),
    "linear": st.fixed_dictionaries({"factor": FACTOR}),
    "dynamic": st.fixed_dictionaries({"factor": FACTOR}),
    "llama3": st.fixed_dictionaries(
        {"factor": FACTOR, "low_freq_factor": st.just(1.0), "high_freq_factor": st.sampled_from([2.0, 4.0])},
        optional={"original_max_position_embeddings": st.sampled_from([32, 64])},
    ),
    "yarn": st.fixed_dictionaries(
        {"factor": FACTOR},
        optional={
            "original_max_position_embeddings": st.sampled_from([32, 64]),
            "beta_fast": st.sampled_from([16.0, 32.0]),
            "beta_slow": st.sampled_from([1.0, 2.0]),
            "attention_factor": st.sampled_from([0.9, 1.3]),
            "mscale": st.sampled_from([0.7, 1.0]),
            "mscale_all_dim": st.sampled_from([0.5, 1.0]),
            "truncate": st.booleans(),
        },
    ),
}


@st.composite
def ropes(draw: st.DrawFn, architecture: str, head_dim: int) -> dict[str, Any]:
    """The fields that say how positions are turned, in the form of transformers 5 or of its predecessors."""
    values: dict[str, Any]
    beside: dict[str, Any] = {}
    if architecture == "Phi3ForCausalLM":
        kind = draw(st.sampled_from(["default", "longrope", "su", "yarn"]))
        fraction = draw(st.sampled_from([None, 0.5, 1.0]))
        pairs = int(head_dim * (fraction or 1.0)) // 2
        values = {} if fraction is None else {"partial_rotary_factor": fraction}
        if kind != "default":
            divisors = st.lists(st.sampled_from([1.0, 1.5, 4.0]), min_size=pairs, max_size=pairs)
            values |= {"short_factor": draw(divisors), "long_factor": draw(divisors)}
            values |= draw(st.fixed_dictionaries({}, optional={"attention_factor": st.just(1.2), "factor": FACTOR}))
            values["original_max_position_embeddings"] = 4096  # transformers wants it there of the older names
    else:
        kind = draw(st.sampled_from(sorted(STRETCHES)))
        values = draw(STRETCHES[kind])
    if draw(st.booleans()):
        beside["original_max_position_embeddings"] = draw(st.sampled_from([32, 128]))
    theta = draw(st.none() | THETA)
    if draw(st.booleans()):
        named = {} if theta is None else {"rope_theta": theta}
        return {"rope_parameters": {"rope_type": kind, **named, **values}, **beside}
    fraction = values.pop("partial_rotary_factor", None)
    beside |= {} if theta is None else {"rope_theta": theta}
    beside |= {} if fraction is None else {"partial_rotary_factor": fraction}
    return {"rope_scaling": {"type": kind, **values} if kind != "default" else None, **beside}


@st.composite
def configurations(draw: st.DrawFn, architecture: str) -> dict[str, Any]:
    """The content of a ``config.json``; what has a default may be left out, or be another family's."""
    heads, kv_heads = draw(HEADS)
    layers = draw(st.integers(1, 4))
    raw: dict[str, Any] = {
        "architectures": [architecture],
        "vocab_size": 272,
        "hidden_size": 16 * heads,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": draw(st.sampled_from([64, 256])),
    }
    # transformers wants it of Mixtral with rope of some kinds, and of Phi-3's divisors it takes no notice of it.
    head_dim = 16 if architecture == "Phi3ForCausalLM" else draw(st.sampled_from([16, 24]))
    if architecture in ("Gemma2ForCausalLM", "MixtralForCausalLM") or head_dim != 16:
        raw["head_dim"] = head_dim
    types = st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=layers, max_size=layers)
    raw |= draw(
        st.fixed_dictionaries(
            {},
            optional={
                "rms_norm_eps": st.sampled_from([1e-6, 1e-2]),
                "tie_word_embeddings": st.booleans(),
                "attention_bias": st.booleans(),
                "mlp_bias": st.booleans(),
                "hidden_act": st.just("silu") if architecture != "Gemma2ForCausalLM" else st.just("gelu"),
                "hidden_activation": st.just("gelu_pytorch_tanh"),
                "query_pre_attn_scalar": st.sampled_from([16, 24]),
                "attn_logit_softcapping": st.sampled_from([None, 5.0]),
                "final_logit_softcapping": st.sampled_from([None, 7.0]),
                "use_sliding_window": st.booleans(),
                "sliding_window": st.sampled_from([9, 30] if architecture == "Gemma2ForCausalLM" else [None, 9, 30]),
                "max_window_layers": st.integers(0, 3),
                "num_local_experts": st.sampled_from([4, 5]),
                "num_experts_per_tok": st.integers(1, 3),
                "pretraining_tp": st.sampled_from([1, 2]),
                "torch_dtype": st.just("bfloat16"),
            },
        )
    )
    if "layer_types" in fields_of({}, architecture) and (raw.get("sliding_window") or "sliding_window" not in raw):
        raw |= draw(st.fixed_dictionaries({}, optional={"layer_types": types}))
    return raw | draw(ropes(architecture, raw.get("head_dim", 128 if architecture == "Qwen3ForCausalLM" else 16)))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_configuration_is_read_as_transformers_reads_it(architecture: str, equality_examples: int) -> None:
    config_class, rotary_class = classes(architecture)

    @settings(max_examples=3 * equality_examples, deadline=None)
    @given(configurations(architecture))
    def compare(raw: dict[str, Any]) -> None:
        ours = ModelConfig.parse(raw)
        theirs = config_class.from_dict(json.loads(json.dumps(raw)))
        head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        assert ours.head_dim == head_dim
        assert ours.kv_heads == theirs.num_key_value_heads
        assert ours.rms_norm_eps == theirs.rms_norm_eps
        assert ours.tied_embeddings == theirs.tie_word_embeddings
        assert ours.windows == windows(architecture, theirs)
        assert ours.activation == ("gelu_tanh" if architecture == "Gemma2ForCausalLM" else "silu")
        gemma = architecture == "Gemma2ForCausalLM"
        scalar = theirs.query_pre_attn_scalar if gemma else head_dim
        assert ours.attention_scale == scalar**-0.5
        assert ours.attention_softcap == ((gemma and theirs.attn_logit_softcapping) or 0.0)
        assert ours.logits_softcap == ((gemma and theirs.final_logit_softcapping) or 0.0)
        knows_bias = architecture in ("Gemma2ForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM")
        assert ours.output_bias == (knows_bias and theirs.attention_bias)
        assert ours.qkv_bias == (architecture == "Qwen2ForCausalLM" or ours.output_bias)
        assert ours.mlp_bias == (architecture == "LlamaForCausalLM" and theirs.mlp_bias)
        if architecture == "MixtralForCausalLM":
            assert (ours.experts, ours.experts_per_token) == (theirs.num_local_experts, theirs.num_experts_per_tok)
        rotary = rotary_class(theirs)
        # To the last bit: what they are off by grows with the position.
        assert torch.equal(inverse_frequencies(ours.rope), rotary.inv_freq)
        assert ours.rope.amplitude == pytest.approx(rotary.attention_scaling)
        # Whatever is served lies where transformers still uses these frequencies.
        original = theirs.rope_parameters.get("original_max_position_embeddings")
        reach = {
            "longrope": lambda: min(original, theirs.max_position_embeddings),
            "yarn": lambda: max(int(original * theirs.rope_parameters["factor"]), theirs.max_position_embeddings),
        }.get(rotary.rope_type, lambda: theirs.max_position_embeddings)
        assert ours.max_positions == reach()

    compare()


def windows(architecture: str, config: Any) -> tuple[int, ...]:
    layers = config.num_hidden_layers
    if architecture == "LlamaForCausalLM":
        return (0,) * layers
    if architecture in ("MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM"):
        return (config.sliding_window or 0,) * layers
    return tuple(config.sliding_window or 0 if kind == "sliding_attention" else 0 for kind in config.layer_types)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_file_that_leaves_out_what_its_class_assumes_gives_the_same_logits(architecture: str, tmp_path: Path) -> None:
    assumed = fields_of({}, architecture)
    overrides = {
        name: value
        for name, value in assumed.items()
        if name not in GEOMETRY and value is not None and not name.startswith(("rope", "num_key_value", "original"))
    }
    tiny_model(tmp_path, family=FAMILIES[architecture], num_key_value_heads=4, **overrides)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    kept = GEOMETRY | {"architectures", "model_type", "num_key_value_heads", "pad_token_id"}
    file.write_text(json.dumps({name: value for name, value in raw.items() if name in kept}))
    tokens = [(7 * index) % VOCAB_SIZE for index in range(1, 60)]
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(torch.tensor([tokens])).logits
    runner = ModelRunner.load(EngineConfig(model=str(tmp_path), dtype="float32", num_blocks=6))
    (found,) = runner.logits([Chunk(tokens, 0, [1, 2, 3, 4], SamplingParams(temperature=0.0))])
    assert (found - expected[0, -1]).abs().max() < 1e-4 * expected[0, -1].abs().max()
