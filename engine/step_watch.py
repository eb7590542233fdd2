"""Knows a step loop that stands still: there is work, and no step ends.

Life cycle: made, :meth:`StepWatch.step` around each step, :meth:`StepWatch.look` at every tick of the worker, which is
another loop than that of the steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from protocol.errors import EngineFailure

LONGEST_LOOK = 1.0
"""Seconds that count at most between two looks: a process that was stopped has not been watched meanwhile."""


class StepWatch:
    """Adds up for how long no step has ended; pure.

    Args:
        limit: seconds of it after which the worker shall end.

    Attributes:
        age: seconds of it so far; 0 while there is no work, or steps end.
    """

    def __init__(self, limit: float) -> None:
        self.age = 0.0
        self._limit = limit
        self._under_way = False
        self._has_ended = False
        self._looked = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step, from its choice to its end."""
        self._under_way = True
        try:
            yield
        finally:
            self._under_way, self._has_ended = False, True

    def look(self, *, busy: bool, now: float) -> None:
        """Take note.

        Args:
            busy: whether there is work for a step.
            now: monotonic seconds.

        Raises:
            EngineFailure: it has been standing for longer than the limit. Nothing in this process can free it.
        """
        # What a step that stands works for may be cancelled meanwhile: then it still stands.
        stands = (busy or self._under_way) and not self._has_ended
        self.age = self.age + min(now - self._looked, LONGEST_LOOK) if stands else 0.0
        self._has_ended, self._looked = False, now
        if self.age > self._limit:
            raise EngineFailure(f"no step has ended for {self.age:.1f} s, though there was work")
