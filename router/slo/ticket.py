"""A place in the router's queue.

::

    WAITING -> ADMITTED -> ENDED
    WAITING -> REFUSED | WITHDRAWN
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

from protocol.transitions import Tracker, TransitionTable
from router.slo.classes import SLOClass

P = TypeVar("P")


class TicketState(Enum):
    """Where a ticket is."""

    WAITING = auto()
    ADMITTED = auto()
    REFUSED = auto()
    WITHDRAWN = auto()
    ENDED = auto()


class TicketEvent(Enum):
    """What moves it."""

    ADMIT = auto()
    REFUSE = auto()
    WITHDRAW = auto()
    END = auto()


TICKETS = TransitionTable(
    "ticket",
    TicketState.WAITING,
    {
        (TicketState.WAITING, TicketEvent.ADMIT): TicketState.ADMITTED,
        (TicketState.WAITING, TicketEvent.REFUSE): TicketState.REFUSED,
        (TicketState.WAITING, TicketEvent.WITHDRAW): TicketState.WITHDRAWN,
        (TicketState.ADMITTED, TicketEvent.REFUSE): TicketState.REFUSED,
        (TicketState.ADMITTED, TicketEvent.END): TicketState.ENDED,
    },
)
"""The one transition table of a ticket. An admitted one is refused if no worker turns out to be in time for it."""


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket(Generic[P]):
    """What admission knows of requests that start as one.

    Attributes:
        payload: whose it is.
        slo: their class.
        tenant: whose share they come out of.
        weight: of that share.
        priority: lower is earlier, among those of one tenant.
        prompt: tokens.
        most: output tokens of each at most.
        sequences: how many they are.
        arrived: when.
        ttft: seconds within which the first token is worth having; infinite for no bound.
        limit: seconds after which nothing of it is.
        output: tokens that they are expected to come to, all of them.
        predicted: seconds to the first token, when they came; None where nobody had to know.
        waited: seconds until they were let in, or refused.
        rank: place among those of one tenant, the least first.
        periods: of the class's share and the tenant's in which they were served; None while they were not.
        tracker: of its state.
    """

    payload: P
    slo: SLOClass
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    prompt: int
    most: int
    sequences: int = 1
    arrived: float
    ttft: float = math.inf
    limit: float = math.inf
    output: float = 0.0
    predicted: float | None = None
    waited: float = 0.0
    rank: tuple[float, int] = (0.0, 0)
    periods: tuple[int, int] | None = None
    tracker: Tracker[TicketState, TicketEvent] = field(default_factory=lambda: TICKETS.start("of a request"))

    @property
    def state(self) -> TicketState:
        """Where it is."""
        return self.tracker.state

    @property
    def tokens(self) -> float:
        """What it counts in a share."""
        return self.prompt + self.output

    @property
    def patient(self) -> bool:
        """Whether all it is promised is to be answered by and by: its class has a deadline and no time to a token."""
        return bool(self.slo.deadline) and math.isinf(self.ttft)

    @property
    def bound(self) -> float:
        """Seconds within which the first token must come."""
        return min(self.ttft, self.limit)
