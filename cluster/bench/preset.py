"""Models by name, as their KV layout: all that a transfer sees of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from protocol.errors import ConfigError
from protocol.layout import ITEMSIZE, KVLayout

PRESETS: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {
        "smollm2-135m": (30, 3, 64),
        "llama-3-8b": (32, 8, 128),
        "llama-3-70b-tp8": (80, 1, 128),
        "deepseek-v2-lite": (27, 1, 288),
        "blocks-64k": (8, 2, 64),
    }
)
"""Layers, KV heads and head dimension.

``tp8`` is one shard of eight. Multi-head latent attention keeps one latent of 512 and a rotary key of 64 elements a
token and layer; as K and V of 288 elements they take the same bytes. ``blocks-64k`` is no model: 64 KiB a block of 16
tokens.
"""
DEFAULT_PRESET = "smollm2-135m"


def layout_of(model: str, *, block_size: int, dtype: str = "bfloat16") -> KVLayout:
    """The KV layout of a preset, or of the Hugging Face model in a directory.

    Raises:
        ConfigError: there is neither a preset nor a directory of that name (lists the presets), or a value is out of
            range.
        CheckpointUnavailable, UnsupportedArchitecture: the directory holds no model that can be read.
    """
    if model in PRESETS:
        layers, heads, width = PRESETS[model]
    elif Path(model).is_dir():
        from engine.models.config import ModelConfig

        config = ModelConfig.read(Path(model))
        layers, heads, width = config.num_layers, config.kv_heads, config.head_dim
    else:
        known = ", ".join(PRESETS)
        raise ConfigError(f"model {model!r} is neither a directory nor one of the presets: {known}", field="model")
    if dtype not in ITEMSIZE:
        raise ConfigError(f"dtype must be one of {sorted(ITEMSIZE)}, got {dtype!r}", field="dtype")
    values = {"num_layers": layers, "kv_heads": heads, "head_dim": width, "block_size": block_size, "dtype": dtype}
    return msgspec.convert(values, KVLayout)
