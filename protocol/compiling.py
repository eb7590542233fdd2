"""Making a C source of ours into a library, once per machine and version of the source.

The library lies in the user's cache under a name made from all that it depends on, so it is never stale; it comes into
being by a rename, so it is never half there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from platformdirs import user_cache_path

from protocol.errors import ConfigError

COMPILERS = ("cc", "gcc", "clang")
LIBRARY = ("-shared", "-fPIC", "-fvisibility=hidden")
"""Flags of every library."""


def find_compiler(owner: str) -> str:
    """Path of a C compiler.

    Raises:
        ConfigError: there is none; ``owner`` is what needs it, in words.
    """
    for name in COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return found
    raise ConfigError(f"{owner} needs a C compiler, and none of {', '.join(COMPILERS)} is here", field="PATH")


def compiled(
    source: Path, flags: Sequence[str], *, owner: str, label: str, against: str = "", cache: Path | None = None
) -> Path:
    """The library of ``source``, made now if it is not in the cache.

    Args:
        source: one C file that includes none of ours.
        flags: to the compiler, after the source and those of every library.
        owner: what the library is for, in words.
        label: first part of the file's name.
        against: what it is linked with, in words; its release belongs in the label.
        cache: folder of finished libraries; ``owner``'s in the user's cache by default.

    Raises:
        ConfigError: there is no compiler, it fails, or the cache cannot be written.
    """
    mark = hashlib.sha256(source.read_bytes() + repr((label, LIBRARY, tuple(flags))).encode()).hexdigest()[:24]
    folder = cache if cache is not None else user_cache_path("kvferry") / label.partition("-")[0]
    target = folder / f"{label}-{mark}.so"
    if target.exists():
        return target
    compiler = find_compiler(owner)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fresh = Path(scratch) / target.name
            command = [compiler, "-o", str(fresh), str(source), *LIBRARY, *flags]
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- our own source
            if done.returncode:
                said = " / ".join(done.stderr.strip().splitlines()[-5:])
                what = f"{source.name} with {against}" if against else source.name
                raise ConfigError(f"{compiler} cannot build {what}: {said}", field="compiler")
            # Two processes may build at once: either file is whole, and the last stays.
            os.replace(fresh, target)
    except OSError as error:
        raise ConfigError(f"cannot keep {owner}'s library in {folder}: {error}", field="cache") from error
    return target
