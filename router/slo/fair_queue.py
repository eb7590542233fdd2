"""Who waits in the router, and whose turn it is: classes share by their weights, tenants within a class by theirs.

Among the requests of one tenant the order is that of the workers' queues (:mod:`router.priority`): a unit of priority
is worth so many seconds of waiting. Priorities do not reach beyond that: nobody gets ahead of another tenant by asking
for it.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, TypeVar

from router.slo.shares import Shares
from router.slo.ticket import Ticket

T = TypeVar("T", bound=Ticket[Any])

_by_rank = attrgetter("rank")


@dataclass(slots=True)
class _Class(Generic[T]):
    shares: Shares = field(default_factory=Shares)
    tenants: dict[str, list[T]] = field(default_factory=dict)
    count: int = 0


class FairQueue(Generic[T]):
    """All tickets that wait.

    Args:
        aging: seconds that a unit of priority is worth.

    Attributes:
        prompt, tokens, sequences: of all that wait, together.
    """

    def __init__(self, aging: float) -> None:
        self._aging = aging
        self._shares = Shares()
        self._classes: dict[str, _Class[T]] = {}
        self._arrivals = 0
        self._count = 0
        self.prompt = 0
        self.tokens = 0.0
        self.sequences = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        """In no order that means anything."""
        for kind in self._classes.values():
            for tickets in kind.tenants.values():
                yield from tickets

    def count(self, slo: str) -> int:
        """How many of a class wait."""
        kind = self._classes.get(slo)
        return 0 if kind is None else kind.count

    def put(self, ticket: T) -> None:
        """Let a ticket wait, behind those of its tenant that are its seniors or its equals."""
        self._arrivals += 1
        ticket.rank = self._rank(ticket)
        kind = self._classes.setdefault(ticket.slo.name, _Class())
        insort(kind.tenants.setdefault(ticket.tenant, []), ticket, key=_by_rank)
        kind.shares.add(ticket.tenant, ticket.weight, ticket.tokens)
        self._shares.add(ticket.slo.name, ticket.slo.weight, ticket.tokens)
        kind.count += 1
        self._add(ticket, 1)

    def head(self) -> T | None:
        """Whose turn it is."""
        if not self._count:
            return None
        kind = self._classes[self._shares.least()]
        return kind.tenants[kind.shares.least()][0]

    def serve(self, ticket: T) -> None:
        """A ticket's turn has come; what it counts is its class's and its tenant's from now on."""
        kind = self._take(ticket)
        ticket.periods = (self._shares.period, kind.shares.period)
        kind.shares.serve(ticket.tenant, ticket.tokens)
        self._shares.serve(ticket.slo.name, ticket.tokens)

    def discard(self, ticket: T) -> None:
        """A ticket waits no more, and has got nothing."""
        kind = self._take(ticket)
        kind.shares.remove(ticket.tenant, ticket.tokens)
        self._shares.remove(ticket.slo.name, ticket.tokens)

    def correct(self, ticket: T, tokens: float) -> None:
        """A ticket that was served came to so many tokens more, or fewer; of others nothing is known here."""
        if ticket.periods is None:
            return
        of_all, of_class = ticket.periods
        self._shares.correct(ticket.slo.name, tokens, of_all)
        self._classes[ticket.slo.name].shares.correct(ticket.tenant, tokens, of_class)

    def ahead(self, ticket: T) -> float:
        """Tokens that are served before a ticket that does not wait yet, if nothing further comes."""
        kind = self._classes.get(ticket.slo.name) or _Class[T]()
        mine = kind.tenants.get(ticket.tenant, [])
        seniors = bisect(mine, self._rank(ticket), key=_by_rank)
        own = sum(each.tokens for each in mine[:seniors])
        of_class = kind.shares.ahead(ticket.tenant, ticket.weight, own)
        return self._shares.ahead(ticket.slo.name, ticket.slo.weight, of_class)

    def junior(self, ticket: T) -> T | None:
        """Who makes room for a ticket in a full class: the last of whoever has most waiting there for its weight.

        None where that would be the ticket itself.
        """
        kind = self._classes[ticket.slo.name]
        name = kind.shares.heaviest()
        mine = kind.tenants.get(ticket.tenant, [])
        theirs = kind.tenants[name]
        asked = (sum(each.tokens for each in mine) + ticket.tokens) / ticket.weight
        if name == ticket.tenant or sum(each.tokens for each in theirs) / theirs[-1].weight <= asked:
            return None
        return theirs[-1]

    def _rank(self, ticket: T) -> tuple[float, int]:
        return ticket.arrived + ticket.priority * self._aging, self._arrivals

    def _take(self, ticket: T) -> _Class[T]:
        kind = self._classes[ticket.slo.name]
        tickets = kind.tenants[ticket.tenant]
        del tickets[bisect(tickets, ticket.rank, key=_by_rank) - 1]
        if not tickets:
            del kind.tenants[ticket.tenant]
        kind.count -= 1
        self._add(ticket, -1)
        return kind

    def _add(self, ticket: T, sign: int) -> None:
        self._count += sign
        self.prompt += sign * ticket.prompt
        self.tokens += sign * ticket.tokens
        self.sequences += sign * ticket.sequences
