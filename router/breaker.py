"""A circuit breaker for each worker: one that keeps failing, though it beats well, gets no new work for a while.

::

    CLOSED -tripped-> OPEN -probed-> HALF_OPEN -answered-> CLOSED
                        ^              | ^
                        +----failed----+ +- probed anew, when the last probe has told nothing in its time

Life cycle of a breaker here: made when its worker first serves or fails, replaced by a fresh one when another
incarnation takes the worker's place, dropped by :meth:`Breakers.keep`. A probe is a real request; one that fails is
tried again elsewhere, as any other. Decides only: whoever places requests asks who is barred.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from protocol.errors import KVFerryError, Overloaded, PoolExhausted, Preempted, WorkerDraining
from protocol.ids import Peer
from protocol.transitions import TransitionTable

OUTCOMES = 128
"""Of one worker that are remembered at most."""
LONGEST_PAUSE = 60.0
"""Seconds between two probes at most: the pause doubles with each that fails."""

BUSY = (Preempted, Overloaded, PoolExhausted, WorkerDraining)
"""What tells of a worker only that it has enough to do."""
NOBODY: frozenset[Peer] = frozenset()


def is_fault(error: KVFerryError) -> bool:
    """Whether a worker is to blame for ``error``."""
    return error.retryable and not isinstance(error, BUSY)


class BreakerState(Enum):
    """What a worker may be given."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class BreakerEvent(Enum):
    """What moves a breaker."""

    TRIPPED = "tripped"
    PROBED = "probed"
    ANSWERED = "answered"
    FAILED = "failed"


BREAKERS = TransitionTable(
    "breaker",
    BreakerState.CLOSED,
    {
        (BreakerState.CLOSED, BreakerEvent.TRIPPED): BreakerState.OPEN,
        (BreakerState.OPEN, BreakerEvent.PROBED): BreakerState.HALF_OPEN,
        (BreakerState.HALF_OPEN, BreakerEvent.PROBED): BreakerState.HALF_OPEN,
        (BreakerState.HALF_OPEN, BreakerEvent.ANSWERED): BreakerState.CLOSED,
        (BreakerState.HALF_OPEN, BreakerEvent.FAILED): BreakerState.OPEN,
    },
)
"""The one transition table of a breaker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakerLimits:
    """When a breaker opens; see ``RouterConfig`` for each. Times in seconds."""

    failures: int = 5
    window: float = 30.0
    cooldown: float = 5.0


@dataclass(frozen=True, slots=True)
class BreakerView:
    """What is shown of one worker's breaker.

    Attributes:
        state: where it stands.
        reason: why it is not closed; empty while it is.
        openings: how often it has opened, over all incarnations of the worker.
    """

    state: BreakerState = BreakerState.CLOSED
    reason: str = ""
    openings: int = 0


class Breaker:
    """Of one incarnation of one worker.

    Args:
        peer: the worker.
        limits: when it opens.
        openings: of earlier incarnations.
    """

    def __init__(self, peer: Peer, limits: BreakerLimits, openings: int = 0) -> None:
        self.peer = peer
        self._limits = limits
        self._tracker = BREAKERS.start(str(peer))
        self._outcomes: deque[tuple[float, float]] = deque(maxlen=OUTCOMES)
        self._openings = openings
        self._reason = ""
        self._pause = limits.cooldown
        self._probe_at = 0.0

    @property
    def view(self) -> BreakerView:
        """What is shown of it."""
        return BreakerView(self._tracker.state, self._reason, self._openings)

    def barred(self, now: float) -> bool:
        """Whether new work shall go elsewhere where it can."""
        return self._tracker.state is not BreakerState.CLOSED and now < self._probe_at

    def chosen(self, now: float) -> None:
        """New work goes to the worker; it is a probe when it is time for one."""
        if self._tracker.state is not BreakerState.CLOSED and now >= self._probe_at:
            self._tracker.move(BreakerEvent.PROBED)
            self._probe_at = now + self._pause

    def answered(self, now: float) -> bool:
        """The worker did its part of a request; returns whether that closed the breaker."""
        if self._tracker.allows(BreakerEvent.ANSWERED):
            self._tracker.move(BreakerEvent.ANSWERED)
            self._outcomes.clear()
            self._reason, self._pause = "", self._limits.cooldown
            return True
        self._outcomes.append((now, 0.0))
        return False

    def failed(self, reason: str, share: float, now: float) -> bool:
        """The worker failed a request.

        Args:
            reason: for a person.
            share: of the blame; less than 1 where others may be at fault.
            now: monotonic seconds.

        Returns:
            Whether that opened the breaker.
        """
        if self._tracker.allows(BreakerEvent.FAILED):
            self._tracker.move(BreakerEvent.FAILED)
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)
            self._open(reason, now)
            return True
        if self._tracker.state is not BreakerState.CLOSED:
            return False
        self._outcomes.append((now, share))
        recent = [blame for when, blame in self._outcomes if now - when <= self._limits.window]
        served, blamed = recent.count(0.0), sum(recent)
        if blamed < self._limits.failures or blamed < served:
            return False
        self._tracker.move(BreakerEvent.TRIPPED)
        self._open(reason, now)
        return True

    def _open(self, reason: str, now: float) -> None:
        self._openings += 1
        self._reason = reason
        self._probe_at = now + self._pause


class Breakers:
    """Those of all workers, by name. May be looked at from any thread.

    Args:
        limits: when each of them opens.
    """

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self._by_name: dict[str, Breaker] = {}
        self._tripped: set[str] = set()
        """Names of those that may not be closed: of a thousand, few."""

    def view(self, peer: Peer) -> BreakerView:
        """What is shown of a worker's breaker."""
        found = self._by_name.get(peer.name)
        if found is None:
            return BreakerView()
        return found.view if found.peer == peer else BreakerView(openings=found.view.openings)

    def barred(self, now: float) -> frozenset[Peer]:
        """Workers that get no new work while there are others."""
        if not self._tripped:
            return NOBODY
        tripped = (self._by_name.get(name) for name in self._tripped)
        return frozenset(breaker.peer for breaker in tripped if breaker is not None and breaker.barred(now))

    def chosen(self, peer: Peer, now: float) -> None:
        """New work goes to ``peer``."""
        self._of(peer).chosen(now)

    def answered(self, peer: Peer, now: float) -> bool:
        """``peer`` did its part of a request; returns whether its breaker closed by that."""
        closed = self._of(peer).answered(now)
        if closed:
            self._tripped.discard(peer.name)
        return closed

    def failed(self, peers: Collection[Peer], reason: str, now: float) -> list[Peer]:
        """One of ``peers`` failed a request, and shares the blame with the others; returns whose breaker opened."""
        opened = [peer for peer in peers if self._of(peer).failed(reason, 1 / len(peers), now)]
        self._tripped.update(peer.name for peer in opened)
        return opened

    def keep(self, names: Iterable[str]) -> None:
        """Forget all other workers."""
        kept = set(names)
        self._by_name = {name: breaker for name, breaker in self._by_name.items() if name in kept}
        self._tripped &= kept

    def _of(self, peer: Peer) -> Breaker:
        known = self._by_name.get(peer.name)
        if known is not None and known.peer.incarnation > peer.incarnation:
            return Breaker(peer, self._limits)  # what a former incarnation did is of no matter
        if known is None or known.peer != peer:
            openings = 0 if known is None else known.view.openings
            known = self._by_name[peer.name] = Breaker(peer, self._limits, openings)
        return known
