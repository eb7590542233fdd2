"""Shared memory that processes leave when they are killed, told apart by test session.

UCX keeps its segments in a folder of the session's own, so that one session may remove what its dead processes left
while another works beside it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARED = Path("/dev/shm")
PREFIX = "kvferry-test-"
VARIABLE = "UCX_POSIX_DIR"


def settle() -> Path | None:
    """Give this process and its children a folder for UCX's segments; None where there is no shared memory."""
    if not SHARED.is_dir():
        return None
    for other in SHARED.glob(f"{PREFIX}*"):
        if not Path(f"/proc/{other.name.removeprefix(PREFIX)}").exists():
            shutil.rmtree(other, ignore_errors=True)
    # The number of this process lets the next one find what was left by a process that was killed.
    folder = SHARED / f"{PREFIX}{os.getpid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    os.environ[VARIABLE] = str(folder)
    return folder


def segments() -> set[Path]:
    """What the processes of this session have in shared memory by UCX."""
    folder = os.environ.get(VARIABLE)
    return {*Path(folder).iterdir()} if folder else set()


def shared_files() -> set[Path]:
    """Whatever has a name in shared memory, but for what other sessions' processes have by UCX."""
    return segments() | {path for path in SHARED.iterdir() if not path.is_dir()}


@contextmanager
def none_left() -> Iterator[None]:
    """Remove at the end what came meanwhile: a killed process cannot take back the segments that UCX made for it."""
    before = segments()
    try:
        yield
    finally:
        for left in segments() - before:
            left.unlink(missing_ok=True)
