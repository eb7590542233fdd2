"""Traces of a prefill worker's part of requests, out of the messages at its edges.

A leg's spans are made when it is over, from the times at which its messages passed: nothing is made between two steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Container
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from protocol.error_info import ErrorInfo
from protocol.ids import Peer, RequestKey
from protocol.messages import (
    Abort,
    Cancel,
    Failed,
    Grant,
    Handover,
    Message,
    Prefill,
    Refuse,
    Settle,
    StageTimes,
    Tokens,
    WorkerLoad,
)
from protocol.tracing import names
from protocol.tracing.config import TracingConfig
from protocol.tracing.legs import Legs
from protocol.worker_watch import WorkerWatch

if TYPE_CHECKING:
    from protocol.tracing.tracer import Tracer

MAX_EVENTS = 128
"""Chunks, and ships, of one prompt that are told of one by one."""


@dataclass(slots=True)
class PrefillLeg:
    """When what happened to one prompt; None where it has not. Monotonic seconds.

    Attributes:
        request: as it came.
        arrived: then.
        chunks: when how many tokens were computed.
        granted: its reader had room.
        first_token, times: it was computed, and what its router was told of that.
        ships: when each began and ended, and its bytes.
        transport: that they went by.
        handed_over, handover: the record was sent to the reader.
        settled: the reader has the blocks.
        ended: the last of all.
        error: why it came to nothing.
        cancelled: nobody wanted it any more.
    """

    request: Prefill
    arrived: float
    chunks: list[tuple[float, int]] = field(default_factory=list)
    granted: float | None = None
    first_token: float | None = None
    times: StageTimes | None = None
    ships: list[tuple[float, float, int]] = field(default_factory=list)
    transport: str = ""
    handed_over: float | None = None
    handover: Handover | None = None
    settled: float | None = None
    ended: float | None = None
    error: ErrorInfo | None = None
    cancelled: bool = False


class PrefillTrace(WorkerWatch):
    """See the module.

    Args:
        tracer: of the process.
        me: the worker.
        known: gives the attempts that it still has to do with.
    """

    def __init__(self, tracer: Tracer, me: Peer, known: Callable[[], Container[RequestKey]]) -> None:
        self._tracer = tracer
        self._me = me
        self._legs: Legs[PrefillLeg] = Legs(known, self._tell)

    def received(self, peer: Peer, message: Message) -> None:
        """A message came from a router or a decode worker."""
        now = time.monotonic()
        if isinstance(message, Prefill):
            if message.traceparent:
                self._legs.open(message.key, PrefillLeg(message, now))
            return
        leg = self._leg(message)
        if leg is None:
            return
        match message:
            case Grant() if leg.granted is None:
                leg.granted = now
            case Settle():
                leg.settled = leg.ended = now
                self._legs.close(message.key)
            case Abort(error=error):
                leg.error, leg.ended = error, now
                self._legs.close(message.key)
            case Cancel():
                # Its forks may still want it; when nobody does the worker forgets it.
                leg.cancelled, leg.ended = True, now

    def sent(self, peer: Peer, message: Message) -> None:
        """A message goes to a router or a decode worker."""
        leg = self._leg(message)
        if leg is None:
            return
        now = time.monotonic()
        match message:
            case Tokens(key=key, times=times, finish_reason=reason):
                leg.first_token, leg.times, leg.ended = now, times, now
                if leg.request.handoff is None or (reason is not None and not leg.request.forks):
                    self._legs.close(key)
            case Handover():
                leg.handed_over, leg.handover, leg.ended = now, message, now
            case Refuse(error=error) if leg.error is None:
                leg.error, leg.ended = error, now
            case Failed(key=key, error=error):
                leg.error, leg.ended = error, now
                self._legs.close(key)

    def computed(self, key: RequestKey, tokens: int) -> None:
        """The first ``tokens`` of a prompt are computed."""
        leg = self._legs.find(key)
        if leg is not None and len(leg.chunks) < MAX_EVENTS:
            leg.chunks.append((time.monotonic(), tokens))

    def shipped(self, key: RequestKey, transport: str, nbytes: int, seconds: float) -> None:
        """A ship of a prompt's blocks was acknowledged."""
        leg = self._legs.find(key)
        if leg is not None and len(leg.ships) < MAX_EVENTS:
            now = time.monotonic()
            leg.ships.append((now - seconds, now, nbytes))
            leg.transport = transport

    def tick(self) -> None:
        """Time passed."""
        self._legs.look()

    def told(self, load: WorkerLoad) -> WorkerLoad:
        """``load``, with the spans that came out, and that did not."""
        tracer = self._tracer
        return msgspec.structs.replace(load, spans_exported=tracer.exported, spans_dropped=tracer.dropped)

    async def close(self) -> None:
        """Tell of what is open, and export what is left."""
        self._legs.close_all()
        await self._tracer.close()

    def _leg(self, message: Message) -> PrefillLeg | None:
        key = getattr(message, "key", None)
        return None if key is None else self._legs.find(key)

    def _tell(self, leg: PrefillLeg) -> None:
        request, end = leg.request, leg.ended
        if end is None:
            return  # it was told twice of the same, or of what had ended before it came
        about: names.Attributes = {
            names.KEY: str(request.key),
            names.ATTEMPT: request.key.attempt,
            names.WORKER: self._me.name,
            names.INPUT_TOKENS: len(request.token_ids),
        }
        whole = self._tracer.enter("prefill_worker", leg.arrived, about, traceparent=request.traceparent)
        times, first = leg.times, leg.first_token
        if times is not None and first is not None:
            started = min(first, leg.arrived + times.prefill_queue)
            whole.note("queue", leg.arrived, started)
            whole.note(
                "prefill",
                started,
                first,
                {names.INPUT_TOKENS: len(request.token_ids), names.CACHED_TOKENS: times.cached_tokens},
                [("chunk", at, {names.COMPUTED: tokens}) for at, tokens in leg.chunks],
            )
        if request.handoff is not None and (leg.granted is not None or leg.handed_over is not None):
            # A grant that was faster than the prompt waited for it.
            whole.note("grant_wait", leg.arrived, leg.arrived if leg.granted is None else leg.granted)
        if leg.ships:
            whole.note(
                "ship",
                min(start for start, _, _ in leg.ships),
                max(stop for _, stop, _ in leg.ships),
                {names.TRANSPORT: leg.transport} | _shipped(leg.handover),
                [("ship", stop, {names.KV_BYTES: n, names.SECONDS: stop - start}) for start, stop, n in leg.ships],
            )
        if leg.handed_over is not None and leg.settled is not None:
            whole.note("settle", leg.handed_over, leg.settled)
        if leg.error is not None:
            whole.fail(leg.error.code, leg.error.message)
        if leg.cancelled:
            whole.add({names.CANCELLED: True})
        whole.end(end)


def _shipped(handover: Handover | None) -> dict[str, names.Value]:
    if handover is None:
        return {}
    return {names.KV_BLOCKS: handover.blocks, names.KV_BYTES: handover.nbytes, names.KV_SECONDS: handover.ship}


@asynccontextmanager
async def watch(
    config: TracingConfig | None, me: Peer, known: Callable[[], Container[RequestKey]]
) -> AsyncIterator[WorkerWatch]:
    """Who looks on at a prefill worker, until the context is left; without a configuration nobody does.

    Raises:
        ConfigError: traces cannot be exported so.
    """
    if config is None:
        yield WorkerWatch()
        return
    trace = PrefillTrace(await asyncio.to_thread(config.open, "prefill", str(me)), me, known)
    try:
        yield trace
    finally:
        await trace.close()
