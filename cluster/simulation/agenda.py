"""What happens when: events in order of their time, on a clock that is nobody's.

Life cycle of an event: put down for a time that has not passed, and done when it has come; equals in the order in which
they were put down, so that the same run happens the same way again.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Agenda:
    """Events to come.

    Attributes:
        now: seconds since the beginning.
        done: how many events there were.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.done = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, event: Callable[..., None], *args: Any) -> None:
        """Do ``event(*args)`` then, or at once when that has passed."""
        self._count += 1
        heappush(self._heap, (when if when > self.now else self.now, self._count, event, args))

    def after(self, seconds: float, event: Callable[..., None], *args: Any) -> None:
        """Do ``event(*args)`` in so many seconds."""
        self.at(self.now + seconds, event, *args)

    def run(self, going: Callable[[], bool], until: float) -> None:
        """Let time pass as long as ``going`` says so, there are events, and the next is not after ``until``."""
        heap = self._heap
        while heap and heap[0][0] <= until and going():
            self.now, _, event, args = heappop(heap)
            self.done += 1
            event(*args)
