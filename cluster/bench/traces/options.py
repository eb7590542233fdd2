"""What a trace is made by."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import ConfigError

MAX_REQUESTS = 10_000_000
MAX_RATE = 1e6
MIN_LIMIT, MAX_LIMIT = 64, 1 << 20
DEFAULT_LIMIT = 32_768
"""Tokens of a prompt and its answer: most models that are served have room for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Which trace, and how its kind is changed.

    Attributes:
        name: of a kind, or the path of a file.
        requests: how many; a file that has fewer is shorter.
        rate: requests a second in the mean. A file without one keeps its own times; else they are scaled to it.
        rate_end: the rate that a ramp ends with, all the way from ``rate``.
        seed: equal seeds make equal traces.
        burstiness: shape of the gamma distribution of the time between two arrivals, as in vLLM's benchmark: 1 is
            Poisson, less comes in bursts, infinity at equal distances. None: as the kind has it.
        prompt_tokens, output_tokens: means; None as the kind has them.
        max_tokens: of a prompt and its answer together: longer ones are cut, conversations end before.

    Raises:
        ConfigError: a value is out of range; names field and value.
    """

    name: str
    requests: int
    rate: float | None = None
    rate_end: float | None = None
    seed: int = 0
    burstiness: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    max_tokens: int = DEFAULT_LIMIT

    def __post_init__(self) -> None:
        within("requests", self.requests, 1, MAX_REQUESTS)
        within("max_tokens", self.max_tokens, MIN_LIMIT, MAX_LIMIT)
        for name, value, least, most in (
            ("rate", self.rate, 1e-6, MAX_RATE),
            ("rate_end", self.rate_end, 1e-6, MAX_RATE),
            ("burstiness", self.burstiness, 1e-3, float("inf")),
            ("prompt_tokens", self.prompt_tokens, 1, MAX_LIMIT),
            ("output_tokens", self.output_tokens, 1, MAX_LIMIT),
        ):
            if value is not None:
                within(name, value, least, most)
        if self.rate_end is not None and self.rate is None:
            raise ConfigError("rate_end needs a rate to begin with", field="rate_end")


def within(name: str, value: float, least: float, most: float) -> None:
    """See that a value lies where it may.

    Raises:
        ConfigError: it does not.
    """
    if not least <= value <= most:
        raise ConfigError(f"{name} must lie in [{least:g}, {most:g}], got {value:g}", field=name)
