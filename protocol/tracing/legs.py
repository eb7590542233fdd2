"""What is being traced at a worker: one leg for each attempt that came with a span to go on from.

Life cycle of a leg: opened when its message comes, closed when the worker has said its last word about the attempt, or
when two looks, one tick apart, have found that the worker does not know it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from protocol.error_info import ErrorInfo
from protocol.ids import RequestKey
from protocol.messages import Handover, Prefill, Reserve, StageTimes

R = TypeVar("R", bound=Reserve | Prefill)


@dataclass(slots=True)
class Leg(Generic[R]):
    """When what happened to one sequence; None where it has not. Monotonic seconds.

    Attributes:
        key: of its own; a fork's is not the request's.
        request: as it came.
        arrived: then.
        chunks: when how many tokens of the prompt were computed here.
        granted: there was room for its blocks at decode, as far as this worker knows.
        handed_over, handover: the record of the prefill worker was sent, or came.
        times: what its router was told with its first token here.
        ended: the last of all.
        error: why it came to nothing.
        cancelled: nobody wanted it any more, by the first word of that; what has all it wants was not cancelled.
    """

    key: RequestKey
    request: R
    arrived: float
    chunks: list[tuple[float, int]] = field(default_factory=list)
    granted: float | None = None
    handed_over: float | None = None
    handover: Handover | None = None
    times: StageTimes | None = None
    ended: float | None = None
    error: ErrorInfo | None = None
    cancelled: bool | None = None


L = TypeVar("L", bound=Leg[Any])


class Legs(Generic[L]):
    """See the module.

    Args:
        known: gives the attempts that the worker still has to do with.
        ended: called with each leg that is closed.
    """

    def __init__(self, known: Callable[[], Container[RequestKey]], ended: Callable[[L], None]) -> None:
        self._known = known
        self._ended = ended
        self._open: dict[RequestKey, tuple[L, RequestKey]] = {}
        self._missed: set[RequestKey] = set()

    def open(self, key: RequestKey, leg: L, carrier: RequestKey | None = None) -> None:
        """Begin to trace ``key``, which the worker knows by its ``carrier`` at first; again does nothing."""
        self._open.setdefault(key, (leg, carrier or key))

    def find(self, key: RequestKey) -> L | None:
        """The leg of ``key``, if it is traced."""
        found = self._open.get(key)
        return None if found is None else found[0]

    def close(self, key: RequestKey) -> None:
        """Nothing more will be heard of it."""
        found = self._open.pop(key, None)
        self._missed.discard(key)
        if found is not None:
            self._ended(found[0])

    def look(self) -> None:
        """Close what the worker has not known since the last look."""
        if not self._open:
            return
        known = self._known()
        missed = {key for key, (_, carrier) in self._open.items() if key not in known and carrier not in known}
        for key in missed & self._missed:
            self.close(key)
        self._missed = missed & self._open.keys()

    def close_all(self) -> None:
        """The worker ends."""
        for key in list(self._open):
            self.close(key)
