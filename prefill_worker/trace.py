"""Traces of a prefill worker's part of requests: see :mod:`protocol.tracing.worker_trace`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial

from protocol.ids import RequestKey
from protocol.messages import (
    Abort,
    Cancel,
    Failed,
    Grant,
    Handover,
    Message,
    Prefill,
    Refuse,
    Reserve,
    Settle,
    Tokens,
)
from protocol.tracing import names
from protocol.tracing.legs import Leg
from protocol.tracing.worker_trace import MAX_EVENTS, WorkerTrace, note_end, note_prompt, watching


@dataclass(slots=True)
class PrefillLeg(Leg[Prefill]):
    """One prompt.

    Attributes:
        first_token: it was computed.
        ships: when each began and ended, and its bytes.
        transport: that they went by.
        settled: the reader has the blocks.
    """

    first_token: float | None = None
    ships: list[tuple[float, float, int]] = field(default_factory=list)
    transport: str = ""
    settled: float | None = None


class PrefillTrace(WorkerTrace[PrefillLeg]):
    """See the module."""

    def begin(self, request: Reserve | Prefill, now: float) -> None:
        """See :meth:`WorkerTrace.begin`."""
        if isinstance(request, Prefill):
            self.legs.open(request.key, PrefillLeg(request.key, request, now))

    def heard(self, leg: PrefillLeg, message: Message, now: float) -> None:
        """See :meth:`WorkerTrace.heard`."""
        match message:
            case Grant() if leg.granted is None:
                leg.granted = now
            case Settle():
                leg.settled = leg.ended = now
                self.legs.close(leg.key)
            case Abort(error=error):
                leg.error, leg.ended = error, now
                self.legs.close(leg.key)
            case Cancel(satisfied=satisfied) if leg.cancelled is None:
                # Its forks may still want it; when nobody does the worker forgets it.
                leg.cancelled, leg.ended = not satisfied, now

    def said(self, leg: PrefillLeg, message: Message, now: float) -> None:
        """See :meth:`WorkerTrace.said`."""
        match message:
            case Tokens(times=times, finish_reason=reason):
                leg.first_token, leg.times, leg.ended = now, times, now
                if leg.request.handoff is None or (reason is not None and not leg.request.forks):
                    self.legs.close(leg.key)
            case Handover():
                leg.handed_over, leg.handover, leg.ended = now, message, now
            case Refuse(error=error) if leg.error is None:
                leg.error, leg.ended = error, now
            case Failed(error=error):
                leg.error, leg.ended = error, now
                self.legs.close(leg.key)

    def shipped(self, key: RequestKey, transport: str, nbytes: int, seconds: float) -> None:
        """A ship of a prompt's blocks was acknowledged."""
        leg = self.legs.find(key)
        if leg is not None and len(leg.ships) < MAX_EVENTS:
            now = time.monotonic()
            leg.ships.append((now - seconds, now, nbytes))
            leg.transport = transport

    def tell(self, leg: PrefillLeg) -> None:
        """See :meth:`WorkerTrace.tell`."""
        request, end = leg.request, leg.ended
        if end is None:
            return  # it was told twice of the same, or of what had ended before it came
        whole = self.tracer.enter("prefill_worker", leg.arrived, self.about(leg), traceparent=request.traceparent)
        if leg.times is not None and leg.first_token is not None:
            note_prompt(whole, leg, leg.times, leg.first_token)
        if request.handoff is not None and (leg.granted is not None or leg.handed_over is not None):
            # A grant that was faster than the prompt waited for it.
            whole.note("grant_wait", leg.arrived, leg.arrived if leg.granted is None else leg.granted)
        if leg.ships:
            whole.note(
                "ship",
                min(start for start, _, _ in leg.ships),
                max(stop for _, stop, _ in leg.ships),
                {names.TRANSPORT: leg.transport} | _shipped(leg),
                [("ship", stop, {names.KV_BYTES: n, names.SECONDS: stop - start}) for start, stop, n in leg.ships],
            )
        if leg.handed_over is not None and leg.settled is not None:
            whole.note("settle", leg.handed_over, leg.settled)
        note_end(whole, leg, end)


def _shipped(leg: PrefillLeg) -> dict[str, names.Value]:
    if leg.handover is None:
        return {}
    seconds = sum(stop - start for start, stop, _ in leg.ships)
    return {names.KV_BLOCKS: leg.handover.blocks, names.KV_BYTES: leg.handover.nbytes, names.KV_SECONDS: seconds}


watch = partial(watching, PrefillTrace, "prefill")
"""Who looks on at a prefill worker: see :func:`~protocol.tracing.worker_trace.watching`."""
