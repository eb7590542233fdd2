"""A model over an eight-bit cache equals transformers' over one whose entries are rounded so; scales of checkpoints."""

from __future__ import annotations

import logging
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE, edit_config, tiny_model
from test_checkpoint import change_weights
from test_model_equality import Served, random_pieces, reference_logits
from transformers import AutoModelForCausalLM, DynamicCache

from engine.float8 import narrowed
from engine.kv_cache import TORCH_DTYPES
from engine.models.config import ModelConfig
from protocol.errors import ConfigError, UnsupportedArchitecture, WeightMismatch
from protocol.layout import CacheDtype

SCALES = (0.02, 0.05, 0.03, 0.01)
"""K's and V's of two layers."""
RELATIVE_RMS = {"float8_e4m3": 2.0**-3 / math.sqrt(12), "float8_e5m2": 2.0**-2 / math.sqrt(12)}
"""Root mean square of the rounding of one element, relative to its power of two: a step, spread evenly."""


class RoundedCache(DynamicCache):
    """transformers' own cache, whose entries are what an eight-bit cache keeps."""

    def __init__(self, config: Any, dtype: CacheDtype, scales: tuple[float, ...]) -> None:
        super().__init__(config=config)
        self._dtype, self._scales = TORCH_DTYPES[dtype], scales

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        kept = []
        for part, states in enumerate((keys, values)):
            scale = self._scales[2 * layer_idx + part] if self._scales else 1.0
            kept.append(narrowed(states, self._dtype, scale).float() * scale)
        return super().update(*kept, layer_idx, *args, **kwargs)


def with_scales(path: Path, scales: tuple[float, ...] = SCALES) -> Path:
    named = {
        f"model.layers.{index // 2}.self_attn.{'kv'[index % 2]}_scale": torch.tensor(scale)
        for index, scale in enumerate(scales)
    }
    change_weights(path, **named)
    return path


@pytest.mark.parametrize("dtype", ["float8_e4m3", "float8_e5m2"])
@pytest.mark.parametrize(
    ("variant", "scaled", "block_size", "order"),
    [
        ({"num_attention_heads": 6, "hidden_size": 96}, True, 4, "HND"),
        ({"family": "gemma2", "head_dim": 32, "sliding_window": 12, "attn_logit_softcapping": 20.0}, False, 8, "NHD"),
    ],
    ids=["llama-scaled", "gemma2"],
)
def test_logits_equal_those_over_a_rounded_cache_of_transformers(
    variant: dict[str, Any], scaled: bool, block_size: int, order: str, dtype: CacheDtype, tmp_path: Path
) -> None:
    tiny_model(tmp_path, seed=3, **variant)
    scales = SCALES if scaled else ()
    if scaled:
        with_scales(tmp_path)
    rng = random.Random(5)
    served = Served(
        tmp_path, rng, kv_cache_dtype=dtype, block_size=block_size, order=order, num_blocks=640 // block_size
    )
    assert served.runner.layout.dtype == dtype
    assert served.runner.layout.scales == tuple(float(torch.tensor(scale)) for scale in scales)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    exact, off = 0, []
    sequences = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 9, 30, 31, 33, 47)]
    for index, sequence in enumerate(sequences):
        with torch.inference_mode():
            cache = RoundedCache(model.config, dtype, served.runner.layout.scales)
            rounded = model(torch.tensor([sequence]), cache=cache).logits[0]
        found, at = [], []
        for piece in random_pieces(sequence, rng):
            found.append(served.runner.logits([served.chunk(index, piece)])[0])
            at.append(served.lengths[index] - 1)
        ours, theirs = torch.stack(found), rounded[at]
        assert ours.isfinite().all()
        exact += int((ours - theirs).abs().max() < 1e-4 * theirs.abs().max())
        plain = reference_logits(tmp_path, [sequence])[0][at]
        off.append(((ours - plain).square().mean() / plain.var()).item())
    # Where a number lies within float32's own error of the middle between two of eight bits, it may be kept as either;
    # that is seen in one sequence of a dozen or two.
    assert exact >= len(sequences) - 1
    # K's rounding is in the scores and V's in what they weigh: two independent errors a layer, each relative to what it
    # is part of, and not more than all of the residual stream. The largest of six is within twice their sum.
    bound = RELATIVE_RMS[dtype] * math.sqrt(2 * 2)
    assert 0.0 < math.sqrt(sum(off) / len(off)) < bound
    assert math.sqrt(max(off)) < 2 * bound


@pytest.mark.parametrize(
    "names",
    [
        "self_attn.{part}_scale",
        "self_attn.attn.{part}_scale",
        "self_attn.{part}_proj.{part}_scale",
        "self_attn.{part}_proj.output_scale",
    ],
)
def test_scales_are_known_by_the_names_that_tools_give_them(
    names: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_model(tmp_path, dtype="bfloat16")
    named = {
        f"model.layers.{layer}.{names.format(part=part)}": torch.tensor([2.0 ** -(1 + layer + (part == "v"))])
        for layer in range(2)
        for part in "kv"
    }
    change_weights(tmp_path, **named)
    with caplog.at_level(logging.INFO, "engine.kv_scales"):
        served = Served(tmp_path, random.Random(0), kv_cache_dtype="float8_e4m3", num_blocks=4)
    assert served.runner.layout.scales == (0.5, 0.25, 0.25, 0.125)
    assert "scales from the checkpoint, 0.125 to 0.5" in caplog.text
    # A cache that is no eight-bit one has no use for them.
    assert Served(tmp_path, random.Random(0), num_blocks=4).runner.layout.scales == ()


def test_without_scales_all_are_one_and_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_model(tmp_path)
    served = Served(tmp_path, random.Random(0), kv_cache_dtype="float8_e5m2", num_blocks=4)
    assert served.runner.layout.scales == ()
    assert "no k_scale and v_scale, so all scales are 1.0" in caplog.text
    ones = with_scales(tiny_model(tmp_path / "ones"), (1.0,) * 4)
    assert Served(ones, random.Random(0), kv_cache_dtype="float8_e5m2", num_blocks=4).runner.layout.scales == ()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model.layers.1.self_attn.v_scale", None, r"layers\.1\.self_attn\.v_scale' is missing"),
        ("model.layers.2.self_attn.v_scale", torch.tensor(1.0), r"layers\.2\.self_attn\.v_scale' has no place"),
        ("model.layers.0.self_attn.k_proj.k_scale", torch.tensor(1.0), "twice"),
        ("model.layers.0.self_attn.k_scale", torch.tensor(0.0), "got 0.0"),
        ("model.layers.0.self_attn.k_scale", torch.tensor(torch.nan), "got nan"),
        ("model.layers.0.self_attn.k_scale", torch.ones(2), r"\(2,\)"),
        ("model.layers.0.self_attn.k_scale", torch.tensor(1), "I64"),
    ],
)
def test_a_wrong_scale_is_named(name: str, value: torch.Tensor | None, said: str, tmp_path: Path) -> None:
    path = with_scales(tiny_model(tmp_path))
    change_weights(path, **{name: value})
    with pytest.raises(WeightMismatch, match=said):
        Served(path, random.Random(0), kv_cache_dtype="float8_e4m3", num_blocks=4)


def test_a_checkpoint_that_quantises_its_cache_alone_is_taken(tmp_path: Path) -> None:
    path = with_scales(tiny_model(tmp_path))
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    told = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    edit_config(path, quantization_config=told)
    assert Served(path, random.Random(0), kv_cache_dtype="float8_e4m3", num_blocks=4).runner.layout.scales
    others: list[dict[str, Any]] = [
        {"quant_method": "fp8"},
        {"config_groups": {"group_0": {}}},
        {"kv_cache_scheme": None},
        {"kv_cache_scheme": scheme | {"strategy": "attn_head"}},
        {"kv_cache_scheme": scheme | {"type": "int"}},
        {"kv_cache_scheme": scheme | {"dynamic": True}},
    ]
    for change in others:
        edit_config(path, quantization_config=told | change)
        with pytest.raises(UnsupportedArchitecture, match="quantization_config"):
            ModelConfig.read(path)


def test_other_types_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="float8_e4m3, float8_e5m2, got 'int8'") as caught:
        Served(tmp_path, random.Random(0), kv_cache_dtype="int8")
    assert caught.value.field == "kv_cache_dtype"
    with pytest.raises(ConfigError, match="got 'float8_e4m3'") as caught:
        Served(tmp_path, random.Random(0), dtype="float8_e4m3")
    assert caught.value.field == "dtype"
