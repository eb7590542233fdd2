"""Lets requests in, makes them wait for their turn, or refuses them. Decides only; no I/O and no clock.

Life cycle of a ticket: :meth:`~Admission.arrive` once; then :meth:`~Admission.next`, as long as it says something,
each time that something may have changed; :meth:`~Admission.placed` or :meth:`~Admission.unplaced` for one that was let
in; and :meth:`~Admission.ended` once for each.

A request is let in when a prefill worker has less than the backlog ahead and a decode worker has room for all that its
answer is expected to come to: what cannot be decoded is not prefilled. Until then it waits here, where its turn comes
by fair shares (:mod:`router.slo.fair_queue`). It is refused as soon as its first token is not predicted to come in
time: most of those that are, when they come, by what is ahead of them and how fast that goes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from protocol.errors import Overloaded, TargetOutOfReach
from protocol.ids import Peer
from router.placer import Placer
from router.policy import Demand
from router.prompt_chain import Prompt
from router.slo.capacity import Capacity, Terms
from router.slo.classes import SLOConfig
from router.slo.expectation import Expectation
from router.slo.fair_queue import FairQueue
from router.slo.ticket import Ticket, TicketEvent, TicketState

T = TypeVar("T", bound=Ticket[Any])

HEADROOM = 0.8
"""Share of its bound that a prediction may use up for a request that has to wait: others may still come before it."""
Reason = Literal["target", "deadline", "queue_full"]
"""Why a request is refused."""


@dataclass(frozen=True, slots=True)
class Admit(Generic[T]):
    """Place it now; ``full`` are the decode workers that have no room for it."""

    ticket: T
    full: frozenset[Peer] = frozenset()


@dataclass(frozen=True, slots=True)
class Refuse(Generic[T]):
    """Tell its client."""

    ticket: T
    reason: Reason
    error: Overloaded


Step = Admit[T] | Refuse[T]


class Admission(Generic[T]):
    """All tickets of one router.

    Args:
        slo: the classes.
        placer: knows the workers.
        aging: seconds that a unit of priority is worth.
    """

    def __init__(self, slo: SLOConfig, placer: Placer, aging: float) -> None:
        self._slo = slo
        self._placer = placer
        self._queue: FairQueue[T] = FairQueue(aging)
        self._all = Expectation()
        self._kinds: dict[str, Expectation] = {}
        self._here: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """How many tickets wait."""
        return len(self._queue)

    def count(self, slo: str) -> int:
        """How many tickets of a class wait."""
        return self._queue.count(slo)

    def arrive(self, ticket: T, prompt: Prompt, demand: Demand, now: float) -> list[Refuse[T]]:
        """Requests come; those that are refused for it, which they may be themselves. The others wait."""
        ticket.output = ticket.sequences * min(float(ticket.most), self._kind(ticket).output)
        capacity = self._capacity(now)
        if capacity.staffed and (self._queue or not self._open(capacity, ticket)):
            ticket.predicted = self._wait(ticket, capacity) + self._placer.soonest(prompt, demand, now)
            if ticket.predicted > HEADROOM * ticket.bound:
                late = ticket.predicted - HEADROOM * ticket.bound
                return [self._refuse(ticket, _late(ticket), late, now)]
        refused = []
        if self._queue.count(ticket.slo.name) >= ticket.slo.max_queue:
            junior = self._queue.junior(ticket)
            if junior is None:
                return [self._refuse(ticket, "queue_full", self._wait(ticket, capacity), now)]
            self._discard(junior)
            refused.append(self._refuse(junior, "queue_full", self._wait(junior, capacity), now))
        self._queue.put(ticket)
        self._here[ticket.slo.name] += 1
        return refused

    def pass_by(self, ticket: T) -> Admit[T]:
        """Let a ticket in though there may be no room: where there are no classes."""
        self._here[ticket.slo.name] += 1
        ticket.tracker.move(TicketEvent.ADMIT)
        return Admit(ticket)

    def next(self, now: float) -> Step[T] | None:
        """What is to be done now, if anything; once it was done, there may be more."""
        ticket = self._queue.head()
        if ticket is None:
            return None
        waited = now - ticket.arrived
        if waited >= ticket.bound:
            return self._drop(ticket, now)
        capacity = self._capacity(now)
        if capacity.staffed and not self._open(capacity, ticket):
            return None
        self._queue.serve(ticket)
        ticket.tracker.move(TicketEvent.ADMIT)
        ticket.waited = waited
        return Admit(ticket, capacity.full(ticket.tokens, ticket.sequences))

    def overdue(self, now: float) -> list[Refuse[T]]:
        """Time passed: those whose bound has, wherever in the queue."""
        return [self._drop(ticket, now) for ticket in list(self._queue) if now - ticket.arrived >= ticket.bound]

    def placed(self, ticket: T, uncached: float) -> None:
        """What was let in went to workers; so many tokens of its prompt are to be computed."""
        self._all.placed(ticket.prompt, uncached)

    def unplaced(self, ticket: T) -> None:
        """What was let in was refused all the same: none of the workers was in time for it."""
        ticket.tracker.move(TicketEvent.REFUSE)
        self._queue.correct(ticket, -ticket.tokens)
        self._leave(ticket)

    def ended(self, ticket: T, output: int, answers: tuple[int, ...]) -> None:
        """Nothing more comes of a ticket.

        Args:
            ticket: one that waits or was let in; of others nothing changes.
            output: tokens that came of it.
            answers: tokens of each of its answers that ended by itself.
        """
        if ticket.state is TicketState.WAITING:
            ticket.tracker.move(TicketEvent.WITHDRAW)
            self._queue.discard(ticket)
        elif ticket.state is TicketState.ADMITTED:
            ticket.tracker.move(TicketEvent.END)
            self._queue.correct(ticket, output - ticket.output)
        else:
            return
        self._leave(ticket)
        for tokens in answers:
            self._all.ended(tokens)
            self._kind(ticket).ended(tokens)

    def _kind(self, ticket: T) -> Expectation:
        return self._kinds.setdefault(ticket.slo.name, Expectation())

    def _capacity(self, now: float) -> Capacity:
        # The strictest of those that are here: a sequence of another class would slow theirs down as well.
        tpots = [tpot for name in self._here if (tpot := self._slo.of(name).tpot)]
        terms = Terms(
            backlog=self._slo.backlog,
            tpot=min(tpots, default=0.0),
            output=self._all.output,
            residual=self._all.residual,
            per_sequence=self._queue.tokens / self._queue.sequences if self._queue else self._all.output,
        )
        return self._placer.capacity(terms, now)

    def _open(self, capacity: Capacity, ticket: T) -> bool:
        return capacity.open(ticket.tokens, ticket.sequences, decodes=ticket.most > 1)

    def _wait(self, ticket: T, capacity: Capacity) -> float:
        """Seconds until a ticket that has just come would be let in."""
        queue = self._queue
        tokens = queue.ahead(ticket)
        share = tokens / queue.tokens if queue.tokens else 0.0
        return capacity.wait(
            share * queue.prompt * self._all.uncached,
            tokens + ticket.tokens,
            share * queue.sequences + ticket.sequences,
        )

    def _drop(self, ticket: T, now: float) -> Refuse[T]:
        """Its time has passed; so much of it as would pass again would be waited for in vain."""
        self._discard(ticket)
        return self._refuse(ticket, _late(ticket), self._wait(ticket, self._capacity(now)), now)

    def _refuse(self, ticket: T, reason: Reason, retry_after: float, now: float) -> Refuse[T]:
        ticket.tracker.move(TicketEvent.REFUSE)
        ticket.waited = now - ticket.arrived
        of_class = f"(class {ticket.slo.name!r})"
        if reason == "queue_full":
            text = f"{ticket.slo.max_queue} requests wait, no more may {of_class}"
            return Refuse(ticket, reason, Overloaded(text, retry_after))
        what = "is wanted" if reason == "target" else "may come"
        when = f"has not come in {ticket.waited:.3g} s"
        if ticket.predicted is not None and not ticket.waited:
            when = f"is predicted in {ticket.predicted:.3g} s"
        text = f"the first token {when}, and {what} within {ticket.bound:g} s {of_class}"
        return Refuse(ticket, reason, TargetOutOfReach(text, retry_after))

    def _discard(self, ticket: T) -> None:
        self._queue.discard(ticket)
        self._leave(ticket)

    def _leave(self, ticket: T) -> None:
        name = ticket.slo.name
        self._here[name] -= 1
        if not self._here[name]:
            del self._here[name]


def _late(ticket: Ticket[Any]) -> Reason:
    return "target" if ticket.ttft <= ticket.limit else "deadline"
