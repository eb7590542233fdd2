"""What is asked for, how often, and within what time."""

from __future__ import annotations

import math

import msgspec

from protocol.rules import check

MAX_TOKENS = 1 << 24


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that come at random (Poisson) and are all alike.

    Attributes:
        prompt_tokens, output_tokens: of each.
        rate: requests a second.
        ttft: seconds to the first token at most.
        tpot: seconds per further token at most, in the mean of a request.
        gap: seconds between two tokens at most; 0 for no bound.
        percentile: share of the requests for which that shall be so.

    Raises:
        ConfigError: a value is outside its range; names the field and the value.
    """

    prompt_tokens: int
    output_tokens: int
    rate: float
    ttft: float
    tpot: float
    gap: float = 0.0
    percentile: float = 0.99

    def __post_init__(self) -> None:
        check(self, ("prompt_tokens", 1 <= self.prompt_tokens <= MAX_TOKENS, f"in [1, {MAX_TOKENS}]"))
        check(self, ("output_tokens", 1 <= self.output_tokens <= MAX_TOKENS, f"in [1, {MAX_TOKENS}]"))
        for field, most in (("rate", 1e6), ("ttft", math.inf), ("tpot", math.inf)):
            check(self, (field, 0 < getattr(self, field) <= most and math.isfinite(getattr(self, field)), "over 0"))
        check(self, ("gap", 0 <= self.gap < math.inf, "at least 0 and finite"))
        check(self, ("percentile", 0.5 <= self.percentile < 1, "in [0.5, 1)"))

    @property
    def total_tokens(self) -> int:
        """Of a request at its end."""
        return self.prompt_tokens + self.output_tokens

    @property
    def mean_context(self) -> int:
        """Tokens that a running sequence sees, in the mean."""
        return self.prompt_tokens + self.output_tokens // 2

    @property
    def decode_tokens(self) -> int:
        """Tokens after the first."""
        return self.output_tokens - 1
