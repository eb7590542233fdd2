"""How much of the prompts that were sent lately each worker got: what comes again goes where it was.

A conversation stays where its prefix is, so who gets a new one gets its later turns too. Were a new one's first turn
placed by its own time alone, all that begin alike would go to one worker as long as that is idle for the moment, and
their later turns would wait for each other.

Life cycle of a worker's part: grows with each prompt that is sent there, and fades.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FADE = 30.0
"""Seconds in which work fades to a third: some turns of a conversation."""
PAUSE = 0.5
"""Seconds between two times at which it fades."""
MEAN_GAIN = 0.02
"""Weight of each prompt in the mean of them."""
PRIOR = 2.0
"""Mean prompts that each worker is taken to have got beside: the first few say nothing yet."""


class RecentWork:
    """Seconds of prompts by row.

    Attributes:
        mean: seconds of a prompt.
        total: of all rows.
    """

    def __init__(self, rows: int) -> None:
        self.mean = self.total = 0.0
        self._seconds: Floats = np.zeros(rows)
        self._faded = -math.inf

    def grow(self, rows: int) -> None:
        """There are more rows."""
        self._seconds = np.concatenate((self._seconds, np.zeros(rows - len(self._seconds))))

    def add(self, row: int, seconds: float, now: float) -> None:
        """A prompt of so many seconds was sent to a worker."""
        if now - self._faded >= PAUSE:
            self._seconds *= math.exp((self._faded - now) / FADE)
            self._faded = now
            self.total = float(self._seconds.sum())
        self.mean += MEAN_GAIN * (seconds - self.mean) if self.mean else seconds
        self._seconds[row] += seconds
        self.total += seconds

    def forget(self, row: int) -> None:
        """A row is another worker's."""
        self._seconds[row] = 0.0
        self.total = float(self._seconds.sum())

    def excess(self, workers: int) -> Floats:
        """By row, the share by which it got more than the mean of so many workers; 0 where it got less."""
        prior = PRIOR * self.mean
        whole = self.total / max(1, workers) + prior
        excess = self._seconds + prior
        if whole:
            excess /= whole
            excess -= 1.0
        np.maximum(excess, 0.0, out=excess)
        return excess

    def excesses(self, rows: list[int]) -> list[float]:
        """The same of some rows, which are all of the workers."""
        prior = PRIOR * self.mean
        whole = self.total / max(1, len(rows)) + prior
        if not whole:
            return [0.0] * len(rows)
        seconds = self._seconds.tolist()
        return [more if (more := (seconds[row] + prior) / whole - 1.0) > 0.0 else 0.0 for row in rows]
