"""Builds the C++ kernels with the system's compiler, once per machine and version of the sources.

The library lies in the user's cache folder under a name that is made from all that it depends on, so it is never
stale; it comes into being by a rename, so it is never half there; and one process builds while the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_FOLDER = Path(__file__).parent
_SOURCES = ("linear.cpp", "pointwise.cpp", "paged_decode.cpp", "prompt_attention.cpp", "tape.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-march=native", "-w"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"),  # not -ffast-math: a NaN must stay one
)
_WIDE_VECTORS = "-mprefer-vector-width=512"
_TIMEOUT_S = 300


def find_compiler() -> str | None:
    """Path of the C++ compiler that builds the library; None where there is none."""
    return next((found for name in _COMPILERS if (found := shutil.which(name))), None)


def build(cache: Path) -> Path | None:
    """The library's file in ``cache``, built if it is not there; None where there is no compiler that can."""
    compiler = find_compiler()
    if compiler is None or platform.system() != "Linux":
        return None
    try:
        target = cache / f"kernels-{_key(compiler)}.so"
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / "build.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _compile(compiler, target)
        return target if target.stat().st_size else None
    except (OSError, subprocess.SubprocessError):  # a full disk, a read-only home, a compiler that hangs
        return None


def _compile(compiler: str, target: Path) -> None:
    """Make ``target``: the library, or an empty file where the compiler refuses, so that it is not asked again."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        sources = [str(_FOLDER / name) for name in _SOURCES]
        for flags in ((*_FLAGS, _WIDE_VECTORS), _FLAGS):  # not every compiler and CPU knows the width
            command = [compiler, *flags, "-o", str(made), *sources]
            done = subprocess.run(command, capture_output=True, check=False, timeout=_TIMEOUT_S)  # noqa: S603
            if done.returncode == 0:
                os.replace(made, target)
                return
        target.touch()


def _key(compiler: str) -> str:
    """A digest of sources, flags, compiler and CPU: what one machine compiles another might not run."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=_TIMEOUT_S)  # noqa: S603
    digest = hashlib.sha256(version.stdout)
    digest.update(" ".join((compiler, *_FLAGS, _WIDE_VECTORS, platform.machine(), *_cpu_features())).encode())
    for path in sorted((*_FOLDER.glob("*.cpp"), *_FOLDER.glob("*.h"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def _cpu_features() -> list[str]:
    wanted = ("flags", "model", "Features", "CPU part")
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0].splitlines()
    return [line for line in lines if line.split("\t")[0].strip() in wanted]
