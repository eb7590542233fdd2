r"""How a worker leaves: it takes no new work, finishes what it has, and is gone. A time limit bounds the finishing.

Life cycle of a worker under :class:`Departure`::

    SERVING -begin-> FINISHING --quiet--------------------------------> GONE
                         \--time's up--> HANDING_BACK --quiet, or time's up again--/

What is not finished when the time is up goes back to its routers, which let it go on elsewhere. *Quiet* means that
nothing was held or read for :data:`QUIET` seconds: a request that was sent just before its router heard of the
departure still comes, and is refused, and the last messages are on their way.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from enum import Enum, auto

from protocol.errors import WorkerDraining
from protocol.transitions import TransitionTable

QUIET = 0.5
"""Seconds without anything to do after which a worker that leaves is gone."""
HAND_BACK_SECONDS = 15.0
"""Seconds that what was handed back gets to come to rest: a transport may still read or write its blocks."""


class DepartureState(Enum):
    """Where a worker stands."""

    SERVING = auto()
    FINISHING = auto()
    HANDING_BACK = auto()
    GONE = auto()


class DepartureEvent(Enum):
    """What moves it."""

    BEGIN = auto()
    QUIET = auto()
    TIME_UP = auto()


DEPARTURES = TransitionTable(
    "departure",
    DepartureState.SERVING,
    {
        (DepartureState.SERVING, DepartureEvent.BEGIN): DepartureState.FINISHING,
        (DepartureState.FINISHING, DepartureEvent.QUIET): DepartureState.GONE,
        (DepartureState.FINISHING, DepartureEvent.TIME_UP): DepartureState.HANDING_BACK,
        (DepartureState.HANDING_BACK, DepartureEvent.QUIET): DepartureState.GONE,
        (DepartureState.HANDING_BACK, DepartureEvent.TIME_UP): DepartureState.GONE,
    },
)
"""The one transition table of a departure."""


class Departure:
    """Decides; pure.

    Args:
        name: of the worker.
    """

    def __init__(self, name: str) -> None:
        self._tracker = DEPARTURES.start(name)
        self._time_up = math.inf
        self._idle_since = math.inf

    @property
    def state(self) -> DepartureState:
        """Where the worker stands."""
        return self._tracker.state

    def begin(self, timeout: float, now: float) -> None:
        """Take no new work from now on; asked again, the earlier end counts."""
        if self.state is DepartureState.SERVING:
            self._tracker.move(DepartureEvent.BEGIN)
        if self.state is DepartureState.FINISHING:
            self._time_up = min(self._time_up, now + timeout)

    def look(self, now: float, *, idle: bool) -> DepartureState | None:
        """The state that the worker has just come to; None where nothing has changed.

        Args:
            now: monotonic seconds.
            idle: whether the worker holds nothing of anybody's.
        """
        if self.state in (DepartureState.SERVING, DepartureState.GONE):
            return None
        self._idle_since = min(self._idle_since, now) if idle else math.inf
        if now - self._idle_since >= QUIET:
            return self._tracker.move(DepartureEvent.QUIET)
        if now < self._time_up:
            return None
        self._time_up = now + HAND_BACK_SECONDS
        return self._tracker.move(DepartureEvent.TIME_UP)


class Leaver:
    """Carries out a worker's departure. Made on the worker's event loop.

    Args:
        name: of the worker.
        idle: whether it holds nothing of anybody's.
        hand_back: gives everything that it has to do back to who asked for it.
        announce: tells every router of it.

    Attributes:
        left: done once the worker is gone.
    """

    def __init__(
        self, name: str, idle: Callable[[], bool], hand_back: Callable[[], None], announce: Callable[[], None]
    ) -> None:
        self.left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._name, self._departure = name, Departure(name)
        self._idle, self._hand_back, self._announce = idle, hand_back, announce

    @property
    def leaving(self) -> bool:
        """Whether the worker takes no new work."""
        return self._departure.state is not DepartureState.SERVING

    def refusal(self) -> WorkerDraining | None:
        """Why new work is not taken; None while it is."""
        return WorkerDraining(f"{self._name} takes no new work") if self.leaving else None

    def begin(self, timeout: float) -> None:
        """Take no new work, and have ``timeout`` seconds to finish what there is."""
        self._departure.begin(timeout, time.monotonic())
        # Every refusal that follows comes over the same connection, and so after this.
        self._announce()

    def tick(self) -> None:
        """Look whether there is anything left to do."""
        if not self.leaving:
            return
        match self._departure.look(time.monotonic(), idle=self._idle()):
            case DepartureState.HANDING_BACK:
                self._hand_back()
            case DepartureState.GONE if not self.left.done():
                self.left.set_result(None)
