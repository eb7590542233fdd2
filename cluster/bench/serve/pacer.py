"""When each request of a trace is sent. Pure: told the time, it says what is to be sent now.

Life cycle of either pacer: :meth:`due` whenever :meth:`next_at` has come or an answer has ended, and :meth:`answered`
for each answer, until :attr:`over`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from cluster.bench.traces.request import TraceRequest


@dataclass(frozen=True, slots=True)
class Order:
    """Send this request.

    Attributes:
        request: it.
        due: when it should have been sent, on the caller's clock.
    """

    request: TraceRequest
    due: float


class Pacer(Protocol):
    """What :func:`cluster.bench.serve.drive.drive` needs."""

    @property
    def over(self) -> bool:
        """Whether nothing more will be due."""

    def due(self, now: float) -> list[Order]:
        """What is to be sent at ``now``."""

    def next_at(self) -> float | None:
        """When something is due next; None where that is for an answer to say, or never."""

    def answered(self) -> None:
        """An answer has ended, or failed."""


class OpenLoop:
    """Sends each request at its time, whatever has become of those before.

    Args:
        requests: by their times.
        start: the caller's time at which the trace's ``begin`` falls.
        begin: in the trace.
    """

    def __init__(self, requests: Iterable[TraceRequest], *, start: float, begin: float = 0.0) -> None:
        self._left = iter(requests)
        self._offset = start - begin
        self._next = next(self._left, None)

    @property
    def over(self) -> bool:
        """Whether all have been sent."""
        return self._next is None

    def due(self, now: float) -> list[Order]:
        """What is to be sent at ``now``, those that are late among them."""
        found: list[Order] = []
        while self._next is not None and self._next.at + self._offset <= now:
            found.append(Order(self._next, self._next.at + self._offset))
            self._next = next(self._left, None)
        return found

    def next_at(self) -> float | None:
        """When the next one is due."""
        return None if self._next is None else self._next.at + self._offset

    def answered(self) -> None:
        """Arrivals wait for no answer."""


class ClosedLoop:
    """Keeps so many requests under way; the trace's times are of no matter.

    Args:
        requests: in their order.
        concurrency: under way at a time.
        until: the caller's time after which none is sent.
    """

    def __init__(self, requests: Iterable[TraceRequest], *, concurrency: int, until: float | None = None) -> None:
        self._left = iter(requests)
        self._free = concurrency
        self._until = until
        self._next = next(self._left, None)

    @property
    def over(self) -> bool:
        """Whether all have been sent, or the time is up."""
        return self._next is None

    def due(self, now: float) -> list[Order]:
        """As many as have a place; each is due when it is sent."""
        if self._until is not None and now >= self._until:
            self._next = None
        found: list[Order] = []
        while self._free and self._next is not None:
            found.append(Order(self._next, now))
            self._next = next(self._left, None)
            self._free -= 1
        return found

    def next_at(self) -> float | None:
        """Only an answer makes room."""
        return None

    def answered(self) -> None:
        """A place is free again."""
        self._free += 1
