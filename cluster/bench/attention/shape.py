"""The heads of a model: all that one layer's attention depends on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from protocol.errors import ConfigError


class HeadShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one layer.

    Attributes:
        heads: of queries.
        kv_heads: of keys and values.
        head_dim: elements of each.
    """

    heads: int
    kv_heads: int
    head_dim: int


SHAPES: Mapping[str, HeadShape] = MappingProxyType(
    {
        "smollm2-135m": HeadShape(heads=9, kv_heads=3, head_dim=64),
        "llama-3-8b": HeadShape(heads=32, kv_heads=8, head_dim=128),
        "llama-3-70b-tp8": HeadShape(heads=8, kv_heads=1, head_dim=128),
        "gemma-2-9b": HeadShape(heads=16, kv_heads=8, head_dim=256),
    }
)
"""Models by name; ``tp8`` is one shard of eight."""
DEFAULT_SHAPE = "smollm2-135m"


def shape_of(model: str) -> HeadShape:
    """The heads of one of :data:`SHAPES`, or of the Hugging Face model in a directory.

    Raises:
        ConfigError: there is neither; lists the names.
        CheckpointUnavailable, UnsupportedArchitecture: the directory holds no model that can be read.
    """
    if model in SHAPES:
        return SHAPES[model]
    if not Path(model).is_dir():
        known = ", ".join(SHAPES)
        raise ConfigError(f"model {model!r} is neither a directory nor one of: {known}", field="model")
    from engine.models.config import ModelConfig

    config = ModelConfig.read(Path(model))
    return HeadShape(heads=config.num_heads, kv_heads=config.kv_heads, head_dim=config.head_dim)
