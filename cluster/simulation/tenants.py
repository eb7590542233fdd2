"""Who sends the requests of a trace: conversations are dealt out, so that each tenant sends its part of them."""

from __future__ import annotations

import random
import re
from bisect import bisect
from itertools import accumulate

from protocol.errors import ConfigError

MAX_TENANTS = 1000


class Tenants:
    """Names, and the part of all conversations that each sends.

    Args:
        parts: by name, in any unit; one nameless tenant where there are none.
        seed: of whose a conversation is.
    """

    def __init__(self, parts: dict[str, float], seed: int) -> None:
        self.names = tuple(parts) or ("",)
        self._seed = seed
        total = sum(parts.values())
        self._ends = [end / total for end in accumulate(parts.values())]

    def of(self, session: int) -> str:
        """Whose a conversation is."""
        if len(self.names) == 1:
            return self.names[0]
        drawn = random.Random(f"{self._seed}:{session}").random()  # noqa: S311
        return self.names[min(bisect(self._ends, drawn), len(self.names) - 1)]


def parse_tenants(text: str) -> dict[str, float]:
    """``heavy=9,light=1``: names, and what each sends of all.

    Raises:
        ConfigError: it is written in another way.
    """
    parts: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if re.fullmatch(r"[\w.-]{1,64}", name) is None or re.fullmatch(r"\d{1,9}(\.\d{1,9})?", value) is None:
            raise ConfigError(f"tenants must be as heavy=9,light=1, got {part!r}", field="tenants")
        if name in parts or not float(value):
            raise ConfigError(f"tenants must have names of their own and parts over 0, got {part!r}", field="tenants")
        parts[name] = float(value)
    if len(parts) > MAX_TENANTS:
        raise ConfigError(f"tenants must be at most {MAX_TENANTS}, got {len(parts)}", field="tenants")
    return parts
