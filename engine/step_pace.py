"""How long steps take lately, by the tokens in them: a line through them, the older ones counting less and less."""

from __future__ import annotations

DECAY = 0.98
"""Weight that a step keeps with each further one: the last fifty or so count."""
SPREAD = 1e-3
"""Variance of the tokens, by their squared mean, from which on a line can be told."""
FIRST = 8
"""Steps before which nothing is told; the slowest of them is left out: one that stood still is not the pace."""
OUTLIER = 10.0
"""What one more may take at most, of what was to be expected: for the same reason."""


class StepPace:
    """Least squares of ``seconds = fixed + per_token * tokens`` over decaying sums."""

    def __init__(self) -> None:
        self._first: list[tuple[int, float]] = []
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A step has ended."""
        if self._weight:
            self._take(tokens, min(seconds, OUTLIER * (self.fixed + self.per_token * tokens)))
            return
        self._first.append((tokens, seconds))
        if len(self._first) == FIRST:
            self._first.remove(max(self._first, key=lambda step: step[1]))
            for step in self._first:
                self._take(*step)

    def _take(self, tokens: int, seconds: float) -> None:
        self._weight = DECAY * self._weight + 1.0
        self._tokens = DECAY * self._tokens + tokens
        self._seconds = DECAY * self._seconds + seconds
        self._squares = DECAY * self._squares + tokens * tokens
        self._products = DECAY * self._products + tokens * seconds

    @property
    def mean_tokens(self) -> float:
        """Tokens of a step in the mean, lately; the line goes through them. 0 before the first."""
        return self._tokens / self._weight if self._weight else 0.0

    @property
    def per_token(self) -> float:
        """Seconds that a token adds to a step; 0 before the first. Half of all where steps are all alike."""
        if not self._tokens:
            return 0.0
        whole = self._seconds / self._tokens
        spread = self._weight * self._squares - self._tokens**2
        if spread <= SPREAD * self._tokens**2:
            return whole / 2
        slope = (self._weight * self._products - self._tokens * self._seconds) / spread
        return min(max(slope, 0.0), whole)

    @property
    def fixed(self) -> float:
        """Seconds of a step whatever is in it."""
        return max(0.0, self._seconds - self.per_token * self._tokens) / self._weight if self._weight else 0.0
