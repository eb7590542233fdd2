"""The list of files, sizes and digests that a converted model directory carries.

Written last, before the directory is renamed into place. Comparing sizes takes microseconds and happens at every
start; comparing digests reads every byte and happens on ``kvferry model verify``.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from cluster.model_conversion import CONVERSION
from cluster.model_source import CHUNK_BYTES

MANIFEST_NAME = "kvferry_manifest.json"
_MAX_MANIFEST_BYTES = 1 << 20


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file: its size in bytes and its sha256 in hex."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a converted directory was made from, how, and what it holds.

    Attributes:
        source: sha256 of the GGUF file, in hex.
        conversion: :data:`cluster.model_conversion.CONVERSION` at the time.
        files: entries by file name.
    """

    source: str
    conversion: int
    files: dict[str, FileEntry]


def write_manifest(directory: Path, source: str) -> None:
    """Hash every file of ``directory``, flush it to disk, and write the manifest beside them."""
    names = sorted(path.name for path in directory.iterdir() if path.is_file())
    files = {name: FileEntry((directory / name).stat().st_size, _sha256(directory / name)) for name in names}
    manifest = directory / MANIFEST_NAME
    manifest.write_bytes(msgspec.json.format(msgspec.json.encode(Manifest(source, CONVERSION, files)), indent=2))
    for path in (*(directory / name for name in names), manifest, directory):
        _flush(path)


def is_intact(directory: Path, source: str) -> bool:
    """Whether ``directory`` was made from ``source`` by today's conversion and every file has its size."""
    manifest = _read(directory)
    if manifest is None or manifest.source != source or manifest.conversion != CONVERSION:
        return False
    return all(_size(directory / name) == entry.size for name, entry in manifest.files.items())


def damaged_files(directory: Path) -> list[str]:
    """Names of the files that are missing or whose bytes differ from the manifest; reads everything.

    A manifest that is missing or unreadable is itself the damaged file.
    """
    manifest = _read(directory)
    if manifest is None:
        return [MANIFEST_NAME]
    return [
        name
        for name, entry in manifest.files.items()
        if _size(directory / name) != entry.size or _sha256(directory / name) != entry.sha256
    ]


def _read(directory: Path) -> Manifest | None:
    path = directory / MANIFEST_NAME
    size = _size(path)
    if size is None or size > _MAX_MANIFEST_BYTES:
        return None
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (msgspec.DecodeError, OSError):
        return None
    # a name with a path in it would make the check, and the removal of damaged files, leave the directory
    return manifest if all(Path(name).name == name for name in manifest.files) else None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
