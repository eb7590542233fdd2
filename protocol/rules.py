"""What settings check their values by."""

from __future__ import annotations

from protocol.errors import ConfigError


def check(settings: object, *rules: tuple[str, bool, str]) -> None:
    """See that each rule's field is valid, a rule being the field, whether it is, and what is wanted of it.

    Raises:
        ConfigError: it is not; names the field and its value.
    """
    for field, valid, wanted in rules:
        if not valid:
            raise ConfigError(f"{field} must be {wanted}, got {getattr(settings, field)!r}", field=field)
