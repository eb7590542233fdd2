"""Traces of a decode worker's part of requests: see :mod:`protocol.tracing.worker_trace`.

A fork of a request has a leg of its own, whose life in the worker begins with its carrier's commit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from protocol.messages import (
    Abort,
    Cancel,
    Failed,
    Grant,
    Handover,
    Message,
    Prefill,
    Reserve,
    Settle,
    StageTimes,
    Tokens,
)
from protocol.tracing import names
from protocol.tracing.legs import Leg
from protocol.tracing.worker_trace import WorkerTrace, note_end, note_prompt, watching

if TYPE_CHECKING:
    from protocol.tracing.tracer import Span


@dataclass(slots=True)
class DecodeLeg(Leg[Reserve | Prefill]):
    """One sequence.

    Attributes:
        committed: its blocks were whole, or its prompt was computed here.
        prefill: what its router was told when this worker had computed the prompt.
        first: its first token of its own was sent.
        tokens: sent so far, by decode steps.
    """

    committed: float | None = None
    prefill: StageTimes | None = None
    first: float | None = None
    tokens: int = 0

    @property
    def forked(self) -> bool:
        """Whether another's request carries it."""
        return self.key != self.request.key


class DecodeTrace(WorkerTrace[DecodeLeg]):
    """See the module."""

    def begin(self, request: Reserve | Prefill, now: float) -> None:
        """See :meth:`WorkerTrace.begin`."""
        for key in (request.key, *(fork.key for fork in request.forks)):
            self.legs.open(key, DecodeLeg(key, request, now), request.key)

    def heard(self, leg: DecodeLeg, message: Message, now: float) -> None:
        """See :meth:`WorkerTrace.heard`."""
        match message:
            case Handover():
                leg.handed_over, leg.handover = now, message
            case Cancel(satisfied=satisfied) if leg.cancelled is None:
                leg.cancelled, leg.ended = not satisfied, now

    def said(self, leg: DecodeLeg, message: Message, now: float) -> None:
        """See :meth:`WorkerTrace.said`."""
        match message:
            case Tokens():
                self._generated(leg, message, now)
            case Grant() if leg.granted is None:
                leg.granted = now
            case Settle():
                self._committed(leg, now)
            case Abort(error=error) if leg.error is None:
                leg.error, leg.ended = error, now
            case Failed(error=error):
                leg.error, leg.ended = error, now
                self.legs.close(leg.key)

    def _committed(self, leg: DecodeLeg, now: float) -> None:
        leg.committed = leg.ended = now
        for fork in leg.request.forks:
            forked = self.legs.find(fork.key)
            if forked is not None:
                forked.committed = now

    def _generated(self, leg: DecodeLeg, message: Tokens, now: float) -> None:
        leg.ended = now
        if isinstance(leg.request, Prefill) and leg.prefill is None:
            leg.prefill, leg.committed = message.times, now
        else:
            if leg.first is None:
                leg.first, leg.times = now, message.times
            leg.tokens += len(message.token_ids)
        if message.finish_reason is not None:
            self.legs.close(leg.key)

    def tell(self, leg: DecodeLeg) -> None:
        """See :meth:`WorkerTrace.tell`."""
        end = leg.ended
        if end is None:
            return  # a fork that was not wanted, or what had ended before it came
        about = self.about(leg) | {names.OUTPUT_TOKENS: leg.tokens}
        arrived = leg.committed if leg.forked and leg.committed is not None else leg.arrived
        whole = self.tracer.enter("decode_worker", arrived, about, traceparent=leg.request.traceparent)
        if not leg.forked:
            _tell_prompt(whole, leg)
        if leg.committed is not None and leg.first is not None:
            whole.note("first_step", leg.committed, leg.first)
            whole.note("decode", leg.first, end, {names.OUTPUT_TOKENS: leg.tokens})
        note_end(whole, leg, max(arrived, end))


def _tell_prompt(whole: Span, leg: DecodeLeg) -> None:
    """How its KV came to be here."""
    if leg.prefill is not None and leg.committed is not None:
        note_prompt(whole, leg, leg.prefill, leg.committed)
    if leg.granted is None:
        return
    whole.note("reserve", leg.arrived, leg.granted)
    if leg.committed is None:
        return
    about: dict[str, names.Value] = {}
    if leg.handover is not None:
        about |= {names.KV_BLOCKS: leg.handover.blocks, names.KV_BYTES: leg.handover.nbytes}
    if leg.times is not None:
        about |= {names.TRANSPORT: leg.times.transport, names.CACHED_BLOCKS: leg.times.decode_cached_blocks}
    told: list[tuple[str, float, names.Attributes]] = []
    if leg.handed_over is not None:
        told.append(("handover", leg.handed_over, {}))
    whole.note("import", leg.granted, leg.committed, about, told)


watch = partial(watching, DecodeTrace, "decode")
"""Who looks on at a decode worker: see :func:`~protocol.tracing.worker_trace.watching`."""
