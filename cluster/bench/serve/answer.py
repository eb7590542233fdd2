"""One request as it went: when what came of it. Pure; times are those of the one who measures."""

from __future__ import annotations

from array import array
from itertools import pairwise

import msgspec

from cluster.bench.serve.events import Piece


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept of a request; seconds, those of ``due`` since the run began.

    Attributes:
        index: its place in the trace.
        due: when it should have been sent.
        late: after that it really was, connecting included.
        ttft: from ``due`` to the first token; None where none came.
        e2e: from ``due`` to the last event.
        tpot: mean of the tokens after the first; None where there were none.
        prompt_tokens, output_tokens: as the server counts; of one that does not, as asked, and as many as events.
        events: that tokens came in.
        error: what kind of failure it was; None where there was none.
    """

    index: int
    due: float
    late: float
    ttft: float | None
    e2e: float
    tpot: float | None
    prompt_tokens: int
    output_tokens: int
    events: int
    error: str | None = None


class Stopwatch:
    """Takes the times of one answer.

    Life cycle: made when it is to be sent, :meth:`sent` when it has been, :meth:`push` for each event, :meth:`record`.
    """

    def __init__(self, *, due: float, now: float) -> None:
        self._due, self._sent, self._last = due, now, now
        self._moments = array("d")
        self._prompt_tokens: int | None = None
        self._output_tokens: int | None = None

    def sent(self, now: float) -> None:
        """The last byte of the request has been handed to the kernel."""
        self._sent = now

    def push(self, piece: Piece, now: float) -> None:
        """An event has come at ``now``."""
        self._last = now
        if piece.tokens:
            self._moments.append(now)
        if piece.usage is not None:
            self._prompt_tokens = piece.usage.prompt_tokens
            self._output_tokens = piece.usage.completion_tokens

    @property
    def gaps(self) -> list[float]:
        """Seconds between two events of tokens."""
        return [after - before for before, after in pairwise(self._moments)]

    def record(self, index: int, *, began: float, asked: int, now: float, error: str | None = None) -> Record:
        """What it came to.

        Args:
            index: of the request.
            began: the time of the run's beginning.
            asked: tokens of the prompt, for a server that does not count.
            now: its end, of one that failed.
            error: as in :class:`Record`.
        """
        events = len(self._moments)
        output = events if self._output_tokens is None else self._output_tokens
        if error is None and not output:
            error = "empty_answer"
        # A text that was held back to its end (half a character) comes with the last event.
        first = self._moments[0] if events else (self._last if output else None)
        last = self._moments[-1] if events else self._last
        return Record(
            index=index,
            due=self._due - began,
            late=self._sent - self._due,
            ttft=None if first is None else first - self._due,
            e2e=(now if error is not None else last) - self._due,
            tpot=(last - first) / (output - 1) if first is not None and output > 1 else None,
            prompt_tokens=asked if self._prompt_tokens is None else self._prompt_tokens,
            output_tokens=output,
            events=events,
            error=error,
        )
