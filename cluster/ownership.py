"""Proves that the flat top-level names of kvferry are kvferry's own.

The names are plain words, and other distributions use some of them: whichever comes first on the path would be imported
in our place.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from protocol.errors import ConfigError

DISTRIBUTION = "kvferry"
TOP_LEVEL_NAMES = ("protocol", "engine", "kv_transfer", "prefill_worker", "decode_worker", "router", "cluster")


def check_ownership(
    names: Sequence[str] = TOP_LEVEL_NAMES,
    *,
    root: Path | None = None,
    owners: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Raise unless each top-level name is imported from kvferry, and claimed by no other distribution.

    Args:
        names: top-level import names.
        root: folder that holds the packages; None takes the one this module was loaded from.
        owners: distributions by top-level name; None asks the installed metadata.

    Raises:
        ConfigError: names the package, and the file or the distribution that stands in its place.
    """
    base = Path(__file__).resolve().parents[1] if root is None else root.resolve()
    claimed = importlib.metadata.packages_distributions() if owners is None else owners
    for name in names:
        others = sorted(set(claimed.get(name, ())) - {DISTRIBUTION})
        if others:
            raise ConfigError(
                f"top-level package {name!r} is also installed by {', '.join(others)}; uninstall it, or install "
                f"{DISTRIBUTION} into an environment of its own",
                field=name,
            )
        found = _location(name)
        if found is None:
            raise ConfigError(f"top-level package {name!r} of {DISTRIBUTION} cannot be imported", field=name)
        if found != base / name:
            raise ConfigError(
                f"top-level package {name!r} would be imported from {found}, not from {base / name}; remove the other "
                "one from the path",
                field=name,
            )


def _location(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin).resolve() if spec.origin else None
