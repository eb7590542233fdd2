"""Reads a Hugging Face model directory: safetensors files, copied straight to where the model wants them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from protocol.errors import CheckpointUnavailable, WeightMismatch

Progress = Callable[[str, float], None]
"""Told the stage and how much of it is done, from 0 to 1."""


def silent(stage: str, done: float) -> None:
    """A :data:`Progress` that shows nothing."""


MAX_JSON_BYTES = 64 << 20
"""Longest JSON file of a checkpoint that is read."""
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
"""Element types that are taken, by safetensors' names."""


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """The object in the JSON file ``name`` of ``directory``.

    Raises:
        CheckpointUnavailable: it is not there, too long, or not a JSON object; names it.
    """
    path = directory / name
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointUnavailable(f"{path} is longer than {MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointUnavailable(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointUnavailable(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointUnavailable(f"{path} is not a JSON object")
    return value


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sharded or not.

    Raises:
        CheckpointUnavailable: there are none, or the index names a file that is not there.
    """
    if (directory / _INDEX).is_file():
        placed = read_json(directory, _INDEX).get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise CheckpointUnavailable(f"{directory / _INDEX} has no weight_map")
        names = sorted({str(name) for name in placed.values()})
    else:
        names = [_SINGLE]
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise CheckpointUnavailable(f"no weight file {name!r} in {directory}")
    return [directory / name for name in names]


def hold_apart(directory: Path, first: str, second: str) -> bool:
    """Whether a checkpoint holds two tensors of these names that differ.

    Raises:
        CheckpointUnavailable: a file is missing or damaged.
    """
    found: dict[str, torch.Tensor] = {}
    for path in weight_files(directory):
        with _opened(path) as shard:
            found |= {name: shard.get_tensor(name) for name in (first, second) if name in shard.keys()}  # noqa: SIM118
    return len(found) == 2 and not torch.equal(found[first], found[second])


def load_weights(
    directory: Path,
    destinations: Mapping[str, torch.Tensor],
    *,
    ignored: Callable[[str], bool],
    progress: Progress = silent,
) -> None:
    """Fill ``destinations`` from the checkpoint; the files are memory-mapped and each tensor is copied once.

    Args:
        directory: of the checkpoint.
        destinations: tensor name to the (possibly strided) tensor that it fills, converted to that one's dtype.
        ignored: whether a name in the checkpoint that has no destination is harmless.
        progress: told how many of the tensors are in place.

    Raises:
        CheckpointUnavailable: a file is missing or damaged.
        WeightMismatch: a tensor is missing, extra, misshapen or not of a float type; names it.
    """
    missing = set(destinations)
    for path in weight_files(directory):
        with _opened(path) as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                if name not in missing:
                    _check_harmless(name, path, destinations, ignored)
                    continue
                _fill(shard, name, destinations[name])
                missing.discard(name)
                progress("weights", 1.0 - len(missing) / len(destinations))
    if missing:
        raise WeightMismatch(f"tensor {min(missing)!r} is missing from {directory} ({len(missing)} missing in all)")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A weight file, memory-mapped; what the library raises over it becomes CheckpointUnavailable."""
    try:
        with safe_open(path, framework="pt", device="cpu") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise CheckpointUnavailable(f"cannot read {path}: {error}") from error


def _check_harmless(
    name: str, path: Path, destinations: Mapping[str, torch.Tensor], ignored: Callable[[str], bool]
) -> None:
    if name in destinations:
        raise WeightMismatch(f"tensor {name!r} is there twice, the second time in {path}")
    if not ignored(name):
        raise WeightMismatch(f"tensor {name!r} in {path} has no place in this model")


def _fill(shard: Any, name: str, destination: torch.Tensor) -> None:
    view = shard.get_slice(name)
    shape, dtype = tuple(view.get_shape()), view.get_dtype()
    if shape != tuple(destination.shape):
        raise WeightMismatch(f"tensor {name!r} has shape {shape}, the model wants {tuple(destination.shape)}")
    if dtype not in FLOATS:
        raise WeightMismatch(f"tensor {name!r} has dtype {dtype}, which is none of {', '.join(FLOATS)}")
    destination.copy_(shard.get_tensor(name))
