"""Settings of speculative decoding: whether a step also checks guesses of what comes next, and how many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protocol.errors import ConfigError

MAX_DRAFT = 64
MAX_MATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How drafts are made.

    Attributes:
        method: ``ngram`` is prompt lookup (Saxena, 2023): what followed the last few tokens where they stood before, in
            the prompt or the output, is what they may be followed by again.
        tokens: most tokens of one draft.
        min_match, max_match: fewest and most last tokens that are looked up; the longest match wins.

    Raises:
        ConfigError: a value is outside its range; names the field and the value.
    """

    method: Literal["ngram"] = "ngram"
    tokens: int = 4
    min_match: int = 2
    max_match: int = 4

    def __post_init__(self) -> None:
        for name, valid, wanted in (
            ("method", self.method == "ngram", "'ngram'"),
            ("tokens", _in(self.tokens, 1, MAX_DRAFT), f"a whole number in [1, {MAX_DRAFT}]"),
            ("min_match", _in(self.min_match, 1, MAX_MATCH), f"a whole number in [1, {MAX_MATCH}]"),
            ("max_match", _in(self.max_match, 1, MAX_MATCH), f"a whole number in [1, {MAX_MATCH}]"),
            ("max_match", self.max_match >= self.min_match, f"at least min_match ({self.min_match})"),
        ):
            if not valid:
                raise ConfigError(f"{name} must be {wanted}, got {getattr(self, name)!r}", field=name)


def _in(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most
