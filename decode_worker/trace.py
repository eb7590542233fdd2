"""Traces of a decode worker's part of requests, out of the messages at its edges.

A leg's spans are made when it is over, from the times at which its messages passed: no step waits for them. A fork of
a request has a leg of its own, whose life in the worker begins with its carrier's commit.
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
    Reserve,
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
    from protocol.tracing.tracer import Span, Tracer

MAX_EVENTS = 128
"""Chunks of one prompt that are told of one by one."""


@dataclass(slots=True)
class DecodeLeg:
    """When what happened to one sequence; None where it has not. Monotonic seconds.

    Attributes:
        request: as it came.
        key: of its own; a fork's is not the request's.
        arrived: then.
        granted: it had its blocks.
        handed_over, handover: the record of the prefill worker came.
        committed: its blocks were whole, or its prompt was computed here.
        prefill: what its router was told when this worker had computed the prompt.
        chunks: when how many tokens of that were computed.
        first, times: its first token of its own was sent, and what its router was told with that.
        tokens: sent so far, by decode steps.
        ended: the last of all.
        error: why it came to nothing.
        cancelled: nobody wanted it any more.
    """

    request: Reserve | Prefill
    key: RequestKey
    arrived: float
    granted: float | None = None
    handed_over: float | None = None
    handover: Handover | None = None
    committed: float | None = None
    prefill: StageTimes | None = None
    chunks: list[tuple[float, int]] = field(default_factory=list)
    first: float | None = None
    times: StageTimes | None = None
    tokens: int = 0
    ended: float | None = None
    error: ErrorInfo | None = None
    cancelled: bool = False

    @property
    def forked(self) -> bool:
        """Whether another's request carries it."""
        return self.key != self.request.key


class DecodeTrace(WorkerWatch):
    """See the module.

    Args:
        tracer: of the process.
        me: the worker.
        known: gives the attempts that it still has to do with.
    """

    def __init__(self, tracer: Tracer, me: Peer, known: Callable[[], Container[RequestKey]]) -> None:
        self._tracer = tracer
        self._me = me
        self._legs: Legs[DecodeLeg] = Legs(known, self._tell)

    def received(self, peer: Peer, message: Message) -> None:
        """A message came from a router or a prefill worker."""
        now = time.monotonic()
        if isinstance(message, Reserve | Prefill):
            if message.traceparent:
                for key in (message.key, *(fork.key for fork in message.forks)):
                    self._legs.open(key, DecodeLeg(message, key, now), message.key)
            return
        leg = self._leg(message)
        if leg is None:
            return
        match message:
            case Handover():
                leg.handed_over, leg.handover = now, message
            case Cancel():
                leg.cancelled, leg.ended = True, now

    def sent(self, peer: Peer, message: Message) -> None:
        """A message goes to a router or a prefill worker."""
        leg = self._leg(message)
        if leg is None:
            return
        now = time.monotonic()
        match message:
            case Tokens():
                self._generated(leg, message, now)
            case Grant() if leg.granted is None:
                leg.granted = now
            case Settle():
                self._committed(leg, now)
            case Abort(error=error) if leg.error is None:
                leg.error, leg.ended = error, now
            case Failed(key=key, error=error):
                leg.error, leg.ended = error, now
                self._legs.close(key)

    def computed(self, key: RequestKey, tokens: int) -> None:
        """The first ``tokens`` of a prompt are computed here."""
        leg = self._legs.find(key)
        if leg is not None and len(leg.chunks) < MAX_EVENTS:
            leg.chunks.append((time.monotonic(), tokens))

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

    def _leg(self, message: Message) -> DecodeLeg | None:
        key = getattr(message, "key", None)
        return None if key is None else self._legs.find(key)

    def _committed(self, leg: DecodeLeg, now: float) -> None:
        leg.committed = leg.ended = now
        for fork in leg.request.forks:
            forked = self._legs.find(fork.key)
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
            self._legs.close(message.key)

    def _tell(self, leg: DecodeLeg) -> None:
        request, end = leg.request, leg.ended
        if end is None:
            return  # a fork that was not wanted, or what had ended before it came
        about: names.Attributes = {
            names.KEY: str(leg.key),
            names.ATTEMPT: leg.key.attempt,
            names.WORKER: self._me.name,
            names.INPUT_TOKENS: len(request.token_ids),
            names.OUTPUT_TOKENS: leg.tokens,
        }
        arrived = leg.committed if leg.forked and leg.committed is not None else leg.arrived
        whole = self._tracer.enter("decode_worker", arrived, about, traceparent=request.traceparent)
        if not leg.forked:
            self._tell_prompt(whole, leg)
        if leg.committed is not None and leg.first is not None:
            whole.note("first_step", leg.committed, leg.first)
            whole.note("decode", leg.first, end, {names.OUTPUT_TOKENS: leg.tokens})
        if leg.error is not None:
            whole.fail(leg.error.code, leg.error.message)
        if leg.cancelled:
            whole.add({names.CANCELLED: True})
        whole.end(max(arrived, end))

    def _tell_prompt(self, whole: Span, leg: DecodeLeg) -> None:
        """How its KV came to be here."""
        if leg.prefill is not None and leg.committed is not None:
            started = min(leg.committed, leg.arrived + leg.prefill.prefill_queue)
            whole.note("queue", leg.arrived, started)
            whole.note(
                "prefill",
                started,
                leg.committed,
                {names.INPUT_TOKENS: len(leg.request.token_ids), names.CACHED_TOKENS: leg.prefill.cached_tokens},
                [("chunk", at, {names.COMPUTED: tokens}) for at, tokens in leg.chunks],
            )
        if leg.granted is None:
            return
        whole.note("reserve", leg.arrived, leg.granted)
        if leg.committed is None:
            return
        about: dict[str, names.Value] = {}
        if leg.handover is not None:
            about |= {names.TRANSPORT: leg.handover.transport, names.KV_BLOCKS: leg.handover.blocks}
            about |= {names.KV_BYTES: leg.handover.nbytes}
        if leg.times is not None:
            about[names.CACHED_BLOCKS] = leg.times.decode_cached_blocks
        told: list[tuple[str, float, names.Attributes]] = []
        if leg.handed_over is not None:
            told.append(("handover", leg.handed_over, {}))
        whole.note("import", leg.granted, leg.committed, about, told)


@asynccontextmanager
async def watch(
    config: TracingConfig | None, me: Peer, known: Callable[[], Container[RequestKey]]
) -> AsyncIterator[WorkerWatch]:
    """Who looks on at a decode worker, until the context is left; without a configuration nobody does.

    Raises:
        ConfigError: traces cannot be exported so.
    """
    if config is None:
        yield WorkerWatch()
        return
    trace = DecodeTrace(await asyncio.to_thread(config.open, "decode", str(me)), me, known)
    try:
        yield trace
    finally:
        await trace.close()
