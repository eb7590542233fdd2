"""What measured times of a role come to, by the predicted ones: load that came later, steps that take for longer.

Life cycle: at 1, moved by each measured time, and back at 1 when none has come for a while. What was true under a load
that is gone would else be held against a role for ever: one that looks slow gets no work, and can show nothing.
"""

from __future__ import annotations

import math

GAIN = 0.1
"""Weight of each measured time."""
FADE = 60.0
"""Seconds in which it fades to a third."""
LARGEST = 8.0
"""What is believed at most, either way."""


class RoleCorrection:
    """Of one kind of predictions."""

    def __init__(self) -> None:
        self._logarithm = 0.0
        self._at = 0.0

    def at(self, now: float) -> float:
        """What a predicted time is to be multiplied with."""
        return math.exp(self._faded(now))

    def correct(self, ratio: float, now: float) -> None:
        """What was predicted, by this correction, took ``ratio`` times as long."""
        most = math.log(LARGEST)
        self._logarithm = min(max(self._faded(now) + GAIN * math.log(ratio), -most), most)
        self._at = now

    def _faded(self, now: float) -> float:
        return self._logarithm * math.exp(min(0.0, self._at - now) / FADE)
