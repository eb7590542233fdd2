"""What requests turn out to be: as much is reckoned with of those that come."""

from __future__ import annotations

FIRST_OUTPUT = 128.0
"""Output tokens that are expected before any request has ended."""
GAIN = 0.02
"""Weight of each further request: the last fifty or so count."""


class Expectation:
    """Running means over the requests of one kind.

    Attributes:
        uncached: share of prompt tokens that no cache had.
    """

    def __init__(self) -> None:
        self.uncached = 1.0
        self._mean = FIRST_OUTPUT
        self._square = 2.0 * FIRST_OUTPUT**2
        self._seen = 0

    @property
    def output(self) -> float:
        """Tokens of an answer."""
        return self._mean

    @property
    def residual(self) -> float:
        """Tokens that an answer which is under way will still have, in the mean over those that are."""
        return self._square / (2.0 * self._mean)

    def placed(self, prompt: int, uncached: float) -> None:
        """A prompt went to a worker that is to compute so much of it."""
        self.uncached += GAIN * (uncached / max(1, prompt) - self.uncached)

    def ended(self, output: int) -> None:
        """An answer has ended by itself."""
        self._seen += 1
        gain = max(GAIN, 1.0 / self._seen)
        self._mean += gain * (max(1, output) - self._mean)
        self._square += gain * (max(1, output) ** 2 - self._square)
