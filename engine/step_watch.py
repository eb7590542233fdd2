"""Knows a step loop that stands still: there is work, and no step ends.

Life cycle: made, :meth:`StepWatch.look` at every tick of the worker, which is another loop than that of the steps.
"""

from __future__ import annotations

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
        self._steps = 0
        self._looked = 0.0

    def look(self, steps: int, *, busy: bool, now: float) -> None:
        """Take note.

        Args:
            steps: that have ended so far.
            busy: whether a step could run, or does.
            now: monotonic seconds.

        Raises:
            EngineFailure: it has been standing for longer than the limit. Nothing in this process can free it.
        """
        stands = busy and steps == self._steps
        self.age = self.age + min(now - self._looked, LONGEST_LOOK) if stands else 0.0
        self._steps, self._looked = steps, now
        if self.age > self._limit:
            raise EngineFailure(f"no step has ended for {self.age:.1f} s, though there was work")
