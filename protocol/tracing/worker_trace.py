"""Traces of a worker's part of requests, out of the messages at its edges.

A leg's spans are made when it is over, from the times at which its messages passed: no step waits for them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Container
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Generic

import msgspec

from protocol.ids import Peer, RequestKey, Role
from protocol.messages import Message, Prefill, Reserve, StageTimes, WorkerLoad
from protocol.tracing import names
from protocol.tracing.config import TracingConfig, tracing
from protocol.tracing.legs import L, Leg, Legs
from protocol.worker_watch import WorkerWatch

if TYPE_CHECKING:
    from protocol.tracing.tracer import Span, Tracer

MAX_EVENTS = 128
"""Things of one kind of one prompt that are told of one by one."""


class WorkerTrace(WorkerWatch, ABC, Generic[L]):
    """See the module. A role says what its messages mean, and what is told of a leg.

    Args:
        tracer: of the process.
        me: the worker.
        known: gives the attempts that it still has to do with.
    """

    def __init__(self, tracer: Tracer, me: Peer, known: Callable[[], Container[RequestKey]]) -> None:
        self.tracer = tracer
        self.me = me
        self.legs: Legs[L] = Legs(known, self.tell)

    @abstractmethod
    def begin(self, request: Reserve | Prefill, now: float) -> None:
        """Open the legs of a request that came with a span to go on from."""

    @abstractmethod
    def heard(self, leg: L, message: Message, now: float) -> None:
        """A message about a leg came."""

    @abstractmethod
    def said(self, leg: L, message: Message, now: float) -> None:
        """A message about a leg goes out."""

    @abstractmethod
    def tell(self, leg: L) -> None:
        """Make the spans of a leg that is over."""

    def received(self, peer: Peer, message: Message) -> None:
        """A message came from a router or another worker."""
        now = time.monotonic()
        if isinstance(message, Reserve | Prefill):
            if message.traceparent:
                self.begin(message, now)
            return
        leg = self._leg(message)
        if leg is not None:
            self.heard(leg, message, now)

    def sent(self, peer: Peer, message: Message) -> None:
        """A message goes to a router or another worker."""
        leg = self._leg(message)
        if leg is not None:
            self.said(leg, message, time.monotonic())

    def computed(self, key: RequestKey, tokens: int) -> None:
        """The first ``tokens`` of a prompt are computed here."""
        leg = self.legs.find(key)
        if leg is not None and len(leg.chunks) < MAX_EVENTS:
            leg.chunks.append((time.monotonic(), tokens))

    def tick(self) -> None:
        """Time passed."""
        self.legs.look()

    def told(self, load: WorkerLoad) -> WorkerLoad:
        """``load``, with the spans that came out, and that did not."""
        tracer = self.tracer
        return msgspec.structs.replace(load, spans_exported=tracer.exported, spans_dropped=tracer.dropped)

    def close(self) -> None:
        """Tell of what is open."""
        self.legs.close_all()

    def about(self, leg: L) -> dict[str, names.Value]:
        """What is told of any leg."""
        return {
            names.KEY: str(leg.key),
            names.ATTEMPT: leg.key.attempt,
            names.WORKER: self.me.name,
            names.INPUT_TOKENS: len(leg.request.token_ids),
        }

    def _leg(self, message: Message) -> L | None:
        key = getattr(message, "key", None)
        return None if key is None else self.legs.find(key)


def note_prompt(whole: Span, leg: Leg[Any], times: StageTimes, computed: float) -> None:
    """Tell of a prompt that was ``computed`` at this worker."""
    started = min(computed, leg.arrived + times.prefill_queue)
    whole.note("queue", leg.arrived, started)
    whole.note(
        "prefill",
        started,
        computed,
        {names.INPUT_TOKENS: len(leg.request.token_ids), names.CACHED_TOKENS: times.cached_tokens},
        [("chunk", at, {names.COMPUTED: tokens}) for at, tokens in leg.chunks],
    )


def note_end(whole: Span, leg: Leg[Any], end: float) -> None:
    """Tell how a leg ended, and when."""
    if leg.error is not None:
        whole.fail(leg.error.code, leg.error.message)
    if leg.cancelled:
        whole.add({names.CANCELLED: True})
    whole.end(end)


@asynccontextmanager
async def watching(
    make: Callable[[Tracer, Peer, Callable[[], Container[RequestKey]]], WorkerTrace[Any]],
    role: Role,
    config: TracingConfig | None,
    me: Peer,
    known: Callable[[], Container[RequestKey]],
) -> AsyncIterator[WorkerWatch]:
    """Who looks on at a worker, until the context is left; without a configuration nobody does.

    Args:
        make: makes the trace of this role.
        role: of the worker.
        config: of the traces.
        me: the worker.
        known: gives the attempts that it still has to do with.

    Raises:
        ConfigError: traces cannot be exported so.
    """
    async with tracing(config, role, str(me)) as tracer:
        if tracer is None:
            yield WorkerWatch()
            return
        trace = make(tracer, me, known)
        try:
            yield trace
        finally:
            trace.close()
