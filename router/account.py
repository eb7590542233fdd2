"""What one router reckons with of one worker: the work ahead of it, and how fast it is.

Ahead is what this router has sent there and is not over, which it knows at any time, and what others have: that by
which a heartbeat counts more. So what comes and goes between two heartbeats is right at once.

Life cycle: opened with an incarnation, told of each heartbeat, charged with what is sent there until it is over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TRUSTED_STEPS = 100
"""Steps after which a worker's own measurement counts as much as that of its role."""
OWN_GAIN = 0.01
"""Weight of each measured time in the correction of one worker by itself."""
LARGEST_CORRECTION = 8.0
NOISE = 1.15
"""Times as long, or as short, that a worker takes and is still equal to the others of its role."""
FADE = 10.0
"""Seconds in which what is thought of a worker alone fades to a third, where nothing new is measured."""


@dataclass(slots=True)
class Account:
    """One incarnation of one worker.

    Attributes:
        own_tokens, own_prompts: tokens that are to be computed of the prompts that this router sent and that have no
            first token yet, and the whole length of those, which is what workers count.
        own_sequences: that it sent and that have not ended.
        others_tokens, others_sequences: of other routers, as of the last heartbeat.
        since, head: when what is at the head of the queue began, and tokens that were ahead then.
        slowness: how many times as long as its role's its steps take.
        correction: what measured times came to, by those that its role's predicts.
        faded: when these two did last.
        old_steps: of its steps, those before it came, or came back.
    """

    own_tokens: float = 0.0
    own_prompts: float = 0.0
    own_sequences: int = 0
    others_tokens: float = 0.0
    others_sequences: int = 0
    since: float = 0.0
    head: float = 0.0
    slowness: float = 1.0
    correction: float = 1.0
    faded: float = 0.0
    old_steps: int = 0

    @property
    def ahead(self) -> float:
        """Prompt tokens."""
        return self.own_tokens + self.others_tokens

    @property
    def sequences(self) -> int:
        """That run, or will."""
        return self.own_sequences + self.others_sequences

    def hear(self, prompts: int, sequences: int, now: float) -> None:
        """A heartbeat: it has so many prompt tokens and sequences of all routers."""
        self.others_tokens = max(0.0, prompts - self.own_prompts)
        self.others_sequences = max(0, sequences - self.own_sequences)
        if not self.own_tokens:
            self.since, self.head = now, self.ahead
        self.head = min(self.head, self.ahead)

    def send(self, tokens: float, prompt: int, now: float) -> None:
        """A prompt goes there, of which so many tokens are to be computed."""
        if not self.ahead:
            self.since, self.head = now, tokens
        self.own_tokens += tokens
        self.own_prompts += prompt

    def over(self, tokens: float, prompt: int, now: float, *, computed: bool) -> None:
        """A prompt of this router's is not ahead any more: it is ``computed``, or nobody wants it."""
        self.own_tokens = max(0.0, self.own_tokens - tokens)
        self.own_prompts = max(0.0, self.own_prompts - prompt)
        if computed:
            self.since, self.head = now, self.ahead
        else:
            self.head = min(self.head, self.ahead)

    def correct(self, ratio: float) -> None:
        """What was predicted of it, by its role's correction, took ``ratio`` times as long."""
        self.correction = bounded(self.correction * ratio**OWN_GAIN)

    def measured(self, slowness: float, steps: int) -> None:
        """It has told a pace, ``slowness`` times that of its role, after so many steps; few of them say little."""
        fresh = max(0, steps - self.old_steps)
        self.slowness = 1.0 + (slowness - 1.0) * fresh / (fresh + TRUSTED_STEPS)

    def fade(self, now: float, *, idle: bool) -> None:
        """Time passed; ``idle`` when nothing new was measured meanwhile.

        Who is taken for slow gets no work, and could never show that it is not.
        """
        keeps = math.exp(min(0.0, self.faded - now) / FADE)
        self.faded = now
        self.correction **= keeps
        if idle:
            self.slowness = 1.0 + (self.slowness - 1.0) * keeps

    def come_back(self, steps: int) -> None:
        """It went, or comes back: what was measured before says little of what it does now."""
        self.correction = self.slowness = 1.0
        self.old_steps = steps


def beyond_noise(factor: float) -> float:
    """What a role's times are to be multiplied with. Were noise in it, the luckiest would get everything."""
    return max(1.0, factor / NOISE) if factor > 1.0 else min(1.0, factor * NOISE)


def bounded(correction: float) -> float:
    """A correction within what is believed."""
    return min(max(correction, 1 / LARGEST_CORRECTION), LARGEST_CORRECTION)
