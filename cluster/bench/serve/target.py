"""Targets that an answer is held to, as the option ``--slo`` has them."""

from __future__ import annotations

import re

import msgspec

from protocol.errors import ConfigError

NAMES = ("ttft", "tpot", "e2e")
UNITS = {"ms": 1e-3, "s": 1.0}


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds that an answer may take at most; None leaves it free.

    Attributes:
        ttft: to the first token.
        tpot: for each token after it, in the mean.
        e2e: to the last.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def met(self, *, ttft: float, tpot: float | None, e2e: float) -> bool:
        """Whether an answer with these times is good."""
        pairs = ((self.ttft, ttft), (self.tpot, tpot), (self.e2e, e2e))
        return all(bound is None or found is None or found <= bound for bound, found in pairs)

    def __str__(self) -> str:
        bounds = ((name, getattr(self, name)) for name in NAMES)
        return ", ".join(f"{name} <= {1e3 * bound:g} ms" for name, bound in bounds if bound is not None)


def parse_target(text: str) -> Target:
    """Targets such as ``ttft=500ms,tpot=0.05s``.

    Raises:
        ConfigError: a name is not known, or a time has no unit; names it.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in NAMES:
            raise ConfigError(f"slo must be of {', '.join(NAMES)}, got {part.strip()!r}", field="slo")
        number = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*(ms|s)", value.strip())
        if number is None:
            raise ConfigError(f"slo: {name} must be a time such as 500ms or 0.5s, got {value!r}", field="slo")
        found[name] = float(number[1]) * UNITS[number[2]]
    return Target(**found)
