"""A stand-in for NVIDIA's driver: built, and told what to pretend."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

PRETENDED = {
    "devices": 1,
    "peers": 1,
    "fail_copies": 0,
    "fail_handles": 0,
    "fail_flushes": 0,
    "rdma": 1,
    "dmabuf": 0,
    "flush_options": 1,
    "ordering": 0,
    "flushes": 0,
    "drains": 0,
}
SOURCE = Path(__file__).parent / "contract" / "stand_in" / "cuda.c"


def build_stand_in(folder: Path) -> Path:
    """Compile the stand-in; skips the test where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    made = folder / "libcuda_stand_in.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(made), str(SOURCE)], check=True, timeout=60)
    return made


def set_up(made: Path, **values: int) -> None:
    """Set what the stand-in of this process pretends, and its counts to 0; what is not named is as on a good GPU."""
    library = ctypes.CDLL(str(made))
    for name, value in {**PRETENDED, **values}.items():
        ctypes.c_int.in_dll(library, f"stand_in_{name}").value = value


def counted(made: Path, name: str) -> int:
    """A count of the stand-in's: ``flushes``, ``drains``."""
    return int(ctypes.c_int.in_dll(ctypes.CDLL(str(made)), f"stand_in_{name}").value)


def held(made: Path) -> int:
    """Contexts and streams that somebody still has, as one number."""
    return int(ctypes.CDLL(str(made)).stand_in_held())
