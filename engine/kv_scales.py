"""The scales of an eight-bit KV cache that a checkpoint brings, by the names that quantising tools give them."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.checkpoint import FLOATS, weight_files
from protocol.errors import CheckpointUnavailable, WeightMismatch
from protocol.layout import FLOAT8, SCALE_RANGE, CacheDtype

_NAME = re.compile(
    r"model\.layers\.(\d+)\.self_attn\.(?:(?:attn\.|[kv]_proj\.|qkv_proj\.)?([kv])_scale|([kv])_proj\.output_scale)"
)

logger = logging.getLogger(__name__)


def is_scale(name: str) -> bool:
    """Whether a checkpoint's tensor of this name is a scale of the KV cache."""
    return _NAME.fullmatch(name) is not None


def cache_scales(directory: Path, num_layers: int, dtype: CacheDtype) -> tuple[float, ...]:
    """The scales for a cache of ``dtype``, as :class:`~protocol.layout.KVLayout` has them; says where they are from.

    Args:
        directory: of the checkpoint.
        num_layers: of the model.
        dtype: of the cache; only an eight-bit one has scales.

    Raises:
        CheckpointUnavailable: a file is missing or damaged.
        WeightMismatch: there are some, but one is missing, twice there, no single number or out of range; names it.
    """
    if dtype not in FLOAT8:
        return ()
    found = _read(directory)
    if not found:
        logger.warning(
            "KV cache in %s: the checkpoint has no k_scale and v_scale, so all scales are 1.0; what is beyond the "
            "type's range is cut to it",
            dtype,
        )
        return ()
    wanted = [(layer, part) for layer in range(num_layers) for part in "kv"]
    for layer, part in sorted(set(wanted).symmetric_difference(found)):
        what = "is missing from" if (layer, part) in wanted else "has no place in this model, from"
        raise WeightMismatch(f"tensor 'model.layers.{layer}.self_attn.{part}_scale' {what} {directory}")
    scales = tuple(found[each] for each in wanted)
    logger.info("KV cache in %s: scales from the checkpoint, %g to %g", dtype, min(scales), max(scales))
    return () if set(scales) == {1.0} else scales


def _read(directory: Path) -> dict[tuple[int, str], float]:
    found: dict[tuple[int, str], float] = {}
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt", device="cpu") as shard:
                for name in shard.keys():  # noqa: SIM118 - not a mapping
                    matched = _NAME.fullmatch(name)
                    if matched is None:
                        continue
                    place = (int(matched[1]), matched[2] or matched[3])
                    if place in found:
                        raise WeightMismatch(f"tensor {name!r} in {path} is a scale that is there twice")
                    found[place] = _number(shard, name)
        except (SafetensorError, OSError) as error:
            raise CheckpointUnavailable(f"cannot read {path}: {error}") from error
    return found


def _number(shard: Any, name: str) -> float:
    view = shard.get_slice(name)
    shape, dtype = tuple(view.get_shape()), view.get_dtype()
    if dtype not in FLOATS or shape not in ((), (1,)):
        raise WeightMismatch(f"tensor {name!r} has shape {shape} and dtype {dtype}, a scale is one float")
    value = float(shard.get_tensor(name).float())
    low, high = SCALE_RANGE
    if not low <= value <= high:
        raise WeightMismatch(f"tensor {name!r} must lie in [{low}, {high}], got {value}")
    return value
