"""Which versions of the wire a process speaks. Two that meet speak the highest that both know."""

from __future__ import annotations

from typing import Annotated

import msgspec

from protocol.errors import ConfigError

Version = Annotated[int, msgspec.Meta(ge=1, le=255)]


class Versions(msgspec.Struct, frozen=True, array_like=True):
    """From one to another, both included.

    Raises:
        ConfigError: the lowest is above the highest.
    """

    lowest: Version
    highest: Version

    def __post_init__(self) -> None:
        if self.lowest > self.highest:
            raise ConfigError(f"lowest must be at most highest, {self.highest}, got {self.lowest}", field="lowest")

    def __str__(self) -> str:
        return f"{self.lowest}" if self.lowest == self.highest else f"{self.lowest} to {self.highest}"

    def common(self, other: Versions) -> int | None:
        """The highest that both know; None where there is none."""
        highest = min(self.highest, other.highest)
        return highest if highest >= max(self.lowest, other.lowest) else None


UNTOLD = Versions(4, 4)
"""Of who tells none: before version 5 each release spoke one version only."""
