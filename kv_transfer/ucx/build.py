"""Making ``shim.c`` into a library, once per machine, source and release of UCX.

The system's UCX comes first: distributions build it with verbs, the wheel on PyPI (``libucx-cu12``) is built without,
and can never do RDMA. The result is kept in the user's cache.
"""

from __future__ import annotations

import ctypes.util
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from platformdirs import user_cache_path

from protocol.errors import ConfigError

SOURCE = Path(__file__).with_name("shim.c")
SYSTEM_INCLUDES = (Path("/usr/include"), Path("/usr/local/include"))
COMPILERS = ("cc", "gcc", "clang")
WANTED = "install UCX with its headers (Debian, Ubuntu: libucx-dev) or the package libucx-cu12"
OLDEST = (1, 13)
_VERSION = re.compile(r"UCP_API_(MAJOR|MINOR)\s+(\d+)")


@dataclass(frozen=True, slots=True)
class Installation:
    """One UCX that a shim can be built against.

    Attributes:
        name: for people.
        include: folder of its headers.
        libraries: folder of its libraries; None where the linker knows.
        version: of its headers.
    """

    name: str
    include: Path
    libraries: Path | None
    version: tuple[int, int]


def header_version(include: Path) -> tuple[int, int] | None:
    """Release of the headers under ``include``, or None where there are none."""
    try:
        text = (include / "ucp" / "api" / "ucp_version.h").read_text()
    except OSError:
        return None
    found = {name: int(number) for name, number in _VERSION.findall(text)}
    return (found["MAJOR"], found["MINOR"]) if found.keys() == {"MAJOR", "MINOR"} else None


def find_ucx() -> Installation:
    """The UCX to use: the system's, else the wheel's.

    Raises:
        ConfigError: there is none with headers, or it is too old; says what was missing.
    """
    missing = []
    for found in (_system(), _wheel()):
        if isinstance(found, str):
            missing.append(found)
        elif found.version < OLDEST:
            missing.append(f"{found.name} is {found.version[0]}.{found.version[1]}, older than {OLDEST[0]}.{OLDEST[1]}")
        else:
            return found
    raise ConfigError(f"no UCX for the ucx transport: {'; '.join(missing)}. {WANTED}", field="transport")


def _system() -> Installation | str:
    if ctypes.util.find_library("ucp") is None:
        return "the system has no libucp"
    for include in SYSTEM_INCLUDES:
        version = header_version(include)
        if version is not None:
            return Installation("the system's UCX", include, None, version)
    return "the system's libucp has no headers"


def _wheel() -> Installation | str:
    spec = find_spec("libucx")
    for folder in map(Path, (spec.submodule_search_locations or ()) if spec else ()):
        version = header_version(folder / "include")
        if version is not None and (folder / "lib" / "libucp.so").exists():
            return Installation("UCX of the libucx wheel", folder / "include", folder / "lib", version)
    return "the package libucx is not installed"


def find_compiler() -> str:
    """Path of a C compiler.

    Raises:
        ConfigError: there is none.
    """
    for name in COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return found
    raise ConfigError(f"the ucx transport needs a C compiler, and none of {', '.join(COMPILERS)} is here", field="PATH")


def built(ucx: Installation, cache: Path | None = None) -> Path:
    """The shim for ``ucx``, made now if it is not in the cache.

    Args:
        ucx: what to build against.
        cache: folder of finished shims; the user's cache by default.

    Raises:
        ConfigError: there is no compiler, it fails, or the cache cannot be written.
    """
    flags = _flags(ucx)
    mark = hashlib.sha256(SOURCE.read_bytes() + repr((flags, ucx.version)).encode()).hexdigest()[:24]
    folder = cache if cache is not None else user_cache_path("kvferry") / "ucx"
    target = folder / f"shim-{ucx.version[0]}.{ucx.version[1]}-{mark}.so"
    if not target.exists():
        compiler = find_compiler()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                fresh = Path(scratch) / target.name
                _compile([compiler, "-o", str(fresh), str(SOURCE), *flags], ucx)
                # Two processes may build at once: either file is whole, and the last stays.
                os.replace(fresh, target)
        except OSError as error:
            raise ConfigError(f"cannot keep the ucx transport's library in {folder}: {error}", field="cache") from error
    return target


def _flags(ucx: Installation) -> tuple[str, ...]:
    flags = ["-O2", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{ucx.include}"]
    if ucx.libraries is not None:
        flags += [f"-L{ucx.libraries}", f"-Wl,-rpath,{ucx.libraries}"]
    return (*flags, "-lucp", "-luct", "-lucs")


def _compile(command: Sequence[str], ucx: Installation) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- our own source
    if done.returncode:
        lines = done.stderr.strip().splitlines()[-5:]
        raise ConfigError(f"{command[0]} cannot build shim.c with {ucx.name}: {' / '.join(lines)}", field="transport")
