"""Making ``shim.c`` into a library, once per machine, source and release of UCX.

The system's UCX comes first: distributions build it with verbs, the wheel on PyPI (``libucx-cu12``) is built without,
and can never do RDMA.
"""

from __future__ import annotations

import ctypes.util
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from protocol.compiling import compiled
from protocol.errors import ConfigError

SOURCE = Path(__file__).with_name("shim.c")
SYSTEM_INCLUDES = (Path("/usr/include"), Path("/usr/local/include"))
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


def built(ucx: Installation, cache: Path | None = None) -> Path:
    """The shim for ``ucx``, made now if it is not in the cache.

    Args:
        ucx: what to build against.
        cache: folder of finished shims; the user's cache by default.

    Raises:
        ConfigError: there is no compiler, it fails, or the cache cannot be written.
    """
    label = f"ucx-{ucx.version[0]}.{ucx.version[1]}"
    return compiled(SOURCE, _flags(ucx), owner="the ucx transport", label=label, against=ucx.name, cache=cache)


def _flags(ucx: Installation) -> tuple[str, ...]:
    flags = ["-O2", f"-I{ucx.include}"]
    if ucx.libraries is not None:
        flags += [f"-L{ucx.libraries}", f"-Wl,-rpath,{ucx.libraries}"]
    return (*flags, "-lucp", "-luct", "-lucs")
