"""The kinds of synthetic traces, as figures."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lengths:
    """A lognormal distribution of numbers of tokens.

    Attributes:
        mean: of the distribution.
        spread: standard deviation of the logarithm; 0 where all are equal.
    """

    mean: float
    spread: float = 0.0

    def draw(self, rng: random.Random) -> int:
        """One of them, at least 1."""
        if not self.spread:
            return max(1, round(self.mean))
        centre = math.log(self.mean) - self.spread * self.spread / 2.0
        return max(1, round(rng.lognormvariate(centre, self.spread)))

    def around(self, mean: float | None) -> Lengths:
        """The same spread around another mean; None leaves it."""
        return self if mean is None else dataclasses.replace(self, mean=mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What one kind of load is like.

    Attributes:
        about: it, in a line.
        prompt: the first message of a conversation.
        output: each answer.
        message: what each later turn adds to the conversation and its last answer.
        turns: the least and the most turns of a conversation; each number between is as likely.
        think: mean seconds from the end of an answer to the next turn.
        systems: how many openings there are, of which each conversation has one.
        system_tokens: of an opening.
        burstiness: see :class:`cluster.bench.traces.options.TraceOptions`.
    """

    about: str
    prompt: Lengths
    output: Lengths
    message: Lengths = Lengths(1)
    turns: tuple[int, int] = (1, 1)
    think: float = 0.0
    systems: int = 0
    system_tokens: int = 0
    burstiness: float = 1.0


KINDS: dict[str, Kind] = {
    "poisson": Kind(
        about="prompts of 512 tokens, answers of 128, nothing shared",
        prompt=Lengths(512),
        output=Lengths(128),
    ),
    "bursts": Kind(
        about="as poisson, but they come in bursts",
        prompt=Lengths(512),
        output=Lengths(128),
        burstiness=0.1,
    ),
    # Means: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, SOSP 2023,
    # figure 11, which gives no spread; that is ours.
    "sharegpt": Kind(
        about="lengths as in ShareGPT's first turns: 161 tokens in, 338 out in the mean, lognormal",
        prompt=Lengths(161.31, 1.2),
        output=Lengths(337.99, 0.9),
    ),
    "long-prompt": Kind(
        about="documents: prompts of 8192 tokens in the mean, short answers",
        prompt=Lengths(8192, 0.5),
        output=Lengths(64, 0.5),
    ),
    "multi-turn": Kind(
        about="conversations of 2 to 10 turns behind one of 8 system prompts; each turn brings all before it",
        prompt=Lengths(128, 0.8),
        output=Lengths(160, 0.7),
        message=Lengths(96, 0.8),
        turns=(2, 10),
        think=8.0,
        systems=8,
        system_tokens=256,
    ),
    "agentic": Kind(
        about="4 agents that call tools 5 to 30 times: a long opening, short answers, results that pile up",
        prompt=Lengths(256, 0.8),
        output=Lengths(80, 0.7),
        message=Lengths(384, 1.0),
        turns=(5, 30),
        think=1.0,
        systems=4,
        system_tokens=2048,
    ),
    "no-reuse": Kind(
        about="lengths that vary, nothing shared: what a prefix cache is of no use for",
        prompt=Lengths(1024, 0.8),
        output=Lengths(128, 0.8),
    ),
}
"""By name. Figures without a source are chosen, not measured."""
