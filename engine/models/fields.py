"""Values of a ``config.json``, each checked as it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protocol.errors import CheckpointUnavailable

_MAX_DIMENSION = 1 << 24


def count(raw: Mapping[str, Any], name: str, default: int | None = None, *, least: int = 1) -> int:
    """A whole number from ``least`` on; ``default`` where ``name`` is missing or null.

    Raises:
        CheckpointUnavailable: it is none, or there is none; names it.
    """
    value = raw.get(name)
    value = default if value is None else value
    if type(value) is not int or not least <= value <= _MAX_DIMENSION:
        raise CheckpointUnavailable(f"config.json: {name} must be in [{least}, {_MAX_DIMENSION}], got {value!r}")
    return value


def number(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A positive number; otherwise as :func:`count`."""
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < 1e30:
        raise CheckpointUnavailable(f"config.json: {name} must be a positive number, got {value!r}")
    return float(value)


def numbers(raw: Mapping[str, Any], name: str, length: int) -> tuple[float, ...]:
    """``length`` positive numbers; otherwise as :func:`count`."""
    values = raw.get(name)
    if not isinstance(values, list) or len(values) != length:
        raise CheckpointUnavailable(f"config.json: {name} must be a list of {length} numbers, got {values!r:.80}")
    return tuple(number({name: value}, name) for value in values)


def flag(raw: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """True or false; otherwise as :func:`count`."""
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise CheckpointUnavailable(f"config.json: {name} must be true or false, got {value!r}")
    return default if value is None else value
