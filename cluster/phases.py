"""Which phase of a start took how long."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import psutil


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of a start.

    Attributes:
        name: of it.
        seconds: that it took.
    """

    name: str
    seconds: float


class PhaseClock:
    """Keeps the phases of one start. Life cycle: made in its first phase -> :meth:`enter` the next ... -> :meth:`end`.

    Args:
        name: of the first phase.
        now: monotonic seconds.
    """

    def __init__(self, name: str, now: float) -> None:
        self._seconds: dict[str, float] = {}
        self._current: str | None = name
        self._since = now

    def enter(self, name: str, now: float) -> None:
        """The current phase is over, and ``name`` begins; one that comes again is added to."""
        if name != self._current:
            self.end(now)
            self._current, self._since = name, now

    def end(self, now: float) -> None:
        """The start is over; harmless when it was."""
        if self._current is not None:
            self._seconds[self._current] = self._seconds.get(self._current, 0.0) + now - self._since
            self._current = None

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Those that are over, in the order in which they came first."""
        return tuple(Phase(name=name, seconds=seconds) for name, seconds in self._seconds.items())


def process_age() -> float:
    """Seconds since this process was started."""
    return max(0.0, time.time() - psutil.Process().create_time())


def since_process_start(name: str) -> PhaseClock:
    """A clock whose first phase began with this process."""
    return PhaseClock(name, time.monotonic() - process_age())


def spelled(phases: Sequence[Phase]) -> str:
    """The phases for a person."""
    total = sum(phase.seconds for phase in phases)
    return f"{total:.1f} s ({', '.join(f'{phase.name} {phase.seconds:.2f}' for phase in phases)})"
