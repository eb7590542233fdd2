"""A checkpoint that does not fit is refused, by the name of what does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_config, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.batch import Chunk
from engine.config import EngineConfig
from engine.models import architectures, family
from engine.models.config import ModelConfig
from engine.runner import ModelRunner
from protocol.errors import CheckpointUnavailable, UnsupportedArchitecture, WeightMismatch
from protocol.sampling import SamplingParams

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path)


def load(path: Path) -> ModelRunner:
    return ModelRunner.load(EngineConfig(model=str(path), dtype="float32", num_blocks=8))


def change_weights(path: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(path / "model.safetensors")
    for name, value in changes.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (Q_PROJ, None, "missing"),
        ("lm_head.weight", None, "missing"),
        ("model.layers.1.self_attn.q_norm.weight", torch.ones(16), "no place"),
        (Q_PROJ, torch.ones(64, 32), r"\(64, 32\).*\(64, 64\)"),
        (Q_PROJ, torch.ones(64, 64, dtype=torch.int8), "I8"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(model: Path, name: str, value: torch.Tensor | None, said: str) -> None:
    change_weights(model, **{name: value})
    with pytest.raises(WeightMismatch, match=f"'{name}'.*{said}"):
        load(model)


def test_harmless_tensors_are_ignored(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, tie_word_embeddings=True)
    embeddings = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(
        path, **{"lm_head.weight": embeddings, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    )
    assert load(path).model_config.tied_embeddings


def test_a_head_that_differs_is_not_tied_whatever_the_configuration_says(tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    edit_config(path, tie_word_embeddings=True)
    runner = load(path)
    assert not runner.model_config.tied_embeddings
    (found,) = runner.logits([Chunk([3, 4, 5], 0, [1], SamplingParams(temperature=0.0))])
    expected = AutoModelForCausalLM.from_pretrained(path)(torch.tensor([[3, 4, 5]])).logits[0, -1]
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_checkpoint_in_another_precision_is_converted(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, dtype="bfloat16")
    assert load(path).layout.dtype == "float32"


def test_missing_and_damaged_files_are_named(model: Path) -> None:
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointUnavailable, match=r"model\.safetensors"):
        load(model)
    weights.unlink()
    with pytest.raises(CheckpointUnavailable, match=r"model\.safetensors"):
        load(model)
    (model / "config.json").write_text("{")
    with pytest.raises(CheckpointUnavailable, match=r"config\.json is not JSON"):
        load(model)
    with pytest.raises(CheckpointUnavailable, match="nowhere"):
        load(model / "nowhere")


@pytest.mark.parametrize("shard", ["absent.safetensors", "../model.safetensors", "/etc/passwd"])
def test_an_index_may_only_name_files_beside_it(model: Path, shard: str) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": shard}}))
    with pytest.raises(CheckpointUnavailable, match=shard):
        load(model)


def test_a_tensor_in_two_shards_is_refused(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    save_file({Q_PROJ: tensors[Q_PROJ]}, model / "second.safetensors")
    placed = {"a": "model.safetensors", "b": "second.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(WeightMismatch, match=f"'{Q_PROJ}' is there twice"):
        load(model)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "proportional"),
        ({"rope_parameters": None, "rope_scaling": {"type": "mrope", "factor": 2.0}}, "mrope"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"sliding_window": 128, "layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compression_config"),
        ({"per_layer_config": {"0": {"num_attention_heads": 2}}}, "per_layer_config"),
    ],
)
def test_what_is_not_served_is_refused_by_name(model: Path, changes: dict[str, Any], said: str) -> None:
    edit_config(model, **changes)
    with pytest.raises(UnsupportedArchitecture, match=said):
        load(model)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 0},
        {"vocab_size": "many"},
        {"hidden_size": 1 << 40},
        {"num_key_value_heads": 3},
        {"head_dim": 15},
        {"rms_norm_eps": -1.0},
        {"tie_word_embeddings": "yes"},
        {"architectures": []},
        {"layer_types": ["full_attention"], "architectures": ["Gemma2ForCausalLM"]},
        {"sliding_window": -1, "architectures": ["MistralForCausalLM"]},
        {"attn_logit_softcapping": 0, "architectures": ["Gemma2ForCausalLM"]},
        {"partial_rotary_factor": 0.2},
        {"num_experts_per_tok": 5, "num_local_experts": 4, "architectures": ["MixtralForCausalLM"]},
        {"factor": 0, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}},
        {"short_factor": 0, "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}},
    ],
)
def test_a_value_out_of_range_is_named(model: Path, changes: dict[str, Any]) -> None:
    edit_config(model, **changes)
    name = next(iter(changes))
    with pytest.raises(CheckpointUnavailable, match=name):
        ModelConfig.read(model)


def test_every_registered_architecture_can_be_imported() -> None:
    assert all(family(name) for name in architectures())


def test_progress_reaches_the_end(model: Path) -> None:
    seen: list[tuple[str, float]] = []
    ModelRunner.load(
        EngineConfig(model=str(model), dtype="float32", num_blocks=8), lambda stage, done: seen.append((stage, done))
    )
    weights = [done for stage, done in seen if stage == "weights"]
    assert weights == sorted(weights)
    assert weights[-1] == 1.0
    assert len(weights) > 2
