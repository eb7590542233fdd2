"""Where a router's requests come to admission, and are told of what became of it: counts, and keeps why.

No I/O. Without classes each is let in when it comes, and only workers' queues decide whose turn it is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from protocol.errors import Overloaded
from router.explanations import Decision, Refusal
from router.front.generation import Generation
from router.instructions import NeedPlacement
from router.live_request import LiveRequest
from router.placer import Placer
from router.request_table import RequestState
from router.slo.admission import Admission, Refuse, Step
from router.slo.classes import SLOConfig
from router.slo.metrics import AdmissionMetrics
from router.slo.ticket import Ticket, TicketState


@dataclass(slots=True, eq=False)
class Group:
    """Requests that start as one.

    Attributes:
        lives: they.
        wish: what they want of a placement.
        left: how many have not ended.
        output: tokens that came of those that have.
        answers: tokens of each that ended by itself.
        started: whether workers have them, or had.
    """

    lives: list[LiveRequest]
    wish: NeedPlacement
    left: int
    output: int = 0
    answers: list[int] = field(default_factory=list)
    started: bool = False

    @property
    def open(self) -> list[LiveRequest]:
        """Those that have not ended."""
        return [live for live in self.lives if not live.machine.ended]


Entry = Ticket[Group]


class Desk:
    """One router's.

    Args:
        slo: the classes.
        placer: knows the workers.
        metrics: counts.
        max_requests: live at once.
        ttft_target: of requests and classes that have none; 0 for none.
        aging: seconds that a unit of priority is worth.

    Attributes:
        stirred: something has changed, so that it may be somebody's turn.
    """

    def __init__(
        self,
        slo: SLOConfig,
        placer: Placer,
        metrics: AdmissionMetrics,
        *,
        max_requests: int,
        ttft_target: float,
        aging: float,
    ) -> None:
        self._slo = slo
        self._placer = placer
        self._metrics = metrics
        self._max_requests = max_requests
        self._ttft_target = ttft_target
        self._admission: Admission[Entry] = Admission(slo, placer, aging)
        self._ready: deque[Step[Entry]] = deque()
        self.stirred = False
        metrics.watch(slo.names, self._admission.count)

    def check_room(self, live: int, generations: Sequence[Generation]) -> None:
        """See that there may be more live requests.

        Raises:
            Overloaded: there may not.
        """
        if live + len(generations) > self._max_requests:
            first = generations[0]
            self._metrics.refused(self._slo.of(first.slo_class).name, "overloaded", len(first.token_ids))
            raise Overloaded(
                f"{live} requests are under way and {len(generations)} more asked for, "
                f"the bound is {self._max_requests}"
            )

    def arrive(self, together: list[LiveRequest], wish: NeedPlacement, now: float) -> None:
        """Requests have come that start as one; :meth:`steps` says what is to be done."""
        generation = together[0].generation
        slo = self._slo.of(generation.slo_class)
        own = generation.ttft_target
        target = (slo.ttft or self._ttft_target) if own is None else own
        ticket = Ticket(
            payload=Group(together, wish, len(together)),
            slo=slo,
            tenant=generation.tenant,
            weight=generation.weight,
            priority=generation.priority,
            prompt=len(generation.token_ids),
            most=generation.sampling.max_tokens,
            sequences=len(together),
            arrived=now,
            ttft=target or math.inf,
        )
        for live in together:
            live.ticket = ticket
        self.stirred = True
        if not self._slo.active:
            self._ready.append(self._admission.pass_by(ticket))
            return
        ticket.limit = generation.timeout or math.inf
        demand = together[0].demand(wish, sequences=len(together))
        self._ready.extend(self._admission.arrive(ticket, together[0].chains, demand, now))

    def steps(self, now: float) -> Iterator[Step[Entry]]:
        """What is to be done, each before the next is asked for."""
        self.stirred = False
        while self._ready or self._admission.waiting:
            step = self._ready.popleft() if self._ready else self._admission.next(now)
            if step is None:
                return
            if isinstance(step, Refuse):
                self._refused(step.ticket, step.reason)
            yield step

    def tick(self, now: float) -> None:
        """Time passed."""
        self.stirred = bool(self._admission.waiting or self._ready)
        self._ready.extend(self._admission.overdue(now))

    def left(self, live: LiveRequest, now: float) -> float:
        """Seconds within which the first token of a request must come; 0 where there is no bound."""
        ticket: Entry | None = live.ticket
        # What was let in is served, late or not.
        if ticket is None or live.machine.attempt or not math.isfinite(ticket.bound):
            return 0.0
        return max(ticket.bound - (now - ticket.arrived), 1e-9)

    def placed(self, group: Sequence[LiveRequest], decision: Decision) -> None:
        """Requests that were let in went to workers."""
        ticket: Entry | None = group[0].ticket
        if ticket is None or decision.attempt:
            return
        decision.admission = self._told(ticket, "admitted")
        if not ticket.payload.started:
            ticket.payload.started = True
            self._admission.placed(ticket, decision.prompt_tokens - decision.cached_tokens)
            self._metrics.admitted(ticket.slo.name, ticket.waited)

    def unplaced(self, group: Sequence[LiveRequest]) -> None:
        """Requests that were let in are refused: no worker was in time for them."""
        ticket: Entry | None = group[0].ticket
        if ticket is not None and ticket.state is TicketState.ADMITTED:
            self._admission.unplaced(ticket)
            self._refused(ticket, "target")

    def forget(self, live: LiveRequest) -> None:
        """A request has ended; done once for each."""
        ticket: Entry | None = live.ticket
        if ticket is None:
            return
        self.stirred = True
        group, machine = ticket.payload, live.machine
        group.left -= 1
        group.output += machine.emitted
        if machine.state is RequestState.FINISHED:
            group.answers.append(machine.emitted)
            line = machine.timeline
            self._metrics.served(ticket.slo, line.ttft, line.tpot(machine.emitted))
        if not group.left:
            self._admission.ended(ticket, group.output, tuple(group.answers))

    def _refused(self, ticket: Entry, reason: str) -> None:
        self._metrics.refused(ticket.slo.name, reason, ticket.prompt)
        for live in ticket.payload.open:
            told = Refusal(live.machine.request_id, ticket.prompt, self._told(ticket, reason))
            self._placer.explanations.keep(live.generation.name or live.machine.request_id, told)

    def _told(self, ticket: Entry, outcome: str) -> dict[str, Any]:
        return {
            "class": ticket.slo.name,
            "outcome": outcome,
            "waited_s": round(ticket.waited, 6),
            "wanted_s": round(ticket.bound, 6) if math.isfinite(ticket.bound) else None,
            "predicted_ttft_s": None if ticket.predicted is None else round(ticket.predicted, 6),
        }
