"""Print the lock: exact versions of everything that kvferry needs, as installed beside this interpreter.

``.venv/bin/python scripts/lock.py > requirements.lock`` after changing a dependency and installing it.
"""

from __future__ import annotations

from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PROJECT = "kvferry"
HEADER = """\
# Every package that kvferry and its checks run with, at the one version they were tested with.
# Made by scripts/lock.py; scripts/bootstrap.sh installs it. torch is one version for all machines: the bootstrap picks
# the build (CUDA where there is an NVIDIA GPU, CPU elsewhere) and gets a CUDA build's own libraries with it."""
LEFT_OUT = ("nvidia-", "cuda-")


def closure(name: str, extras: frozenset[str], found: dict[str, tuple[Distribution, frozenset[str]]]) -> None:
    """Add ``name``, asked for with ``extras``, and all that it requires here, to ``found``."""
    key = canonicalize_name(name)
    before = found[key][1] if key in found else frozenset()
    if key in found and extras <= before:
        return
    extras |= before
    found[key] = (distribution(name), extras)
    for text in found[key][0].requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
            closure(requirement.name, frozenset(requirement.extras), found)


def main() -> None:
    """Write the lock to standard output."""
    found: dict[str, tuple[Distribution, frozenset[str]]] = {}
    try:
        closure(PROJECT, frozenset({"dev", "docs"}), found)
        # pip fetches the default model, setuptools builds the project itself
        for tool in ("pip", "setuptools"):
            closure(tool, frozenset(), found)
    except PackageNotFoundError as error:
        raise SystemExit(f"{error.name} is required but not installed") from error
    print(HEADER)
    for key in sorted(found):
        if key != PROJECT and not key.startswith(LEFT_OUT):
            print(f"{key}=={Version(found[key][0].version).public}")


if __name__ == "__main__":
    main()
