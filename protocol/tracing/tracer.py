"""Spans of one process, in its own monotonic seconds. Imports OpenTelemetry: made by :meth:`TracingConfig.open` alone.

Life cycle: made exporting, :meth:`Tracer.enter` for each request that comes in, :meth:`Tracer.close` once.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE, OTEL_SERVICE_NAME
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from protocol.errors import ConfigError
from protocol.tracing.config import TracingConfig
from protocol.tracing.names import ERROR_TYPE, Attributes
from protocol.tracing.span_queue import CountedExporter, SpanQueue

QUEUED_SPANS = 2048
"""That wait for the collector at most, unless OTEL_BSP_MAX_QUEUE_SIZE says otherwise."""
CLOSE_TIMEOUT = 2.0
"""Seconds in which the last spans may still be taken when a process ends."""
LONGEST_PARENT = 256
LONGEST_STATE = 512
"""Characters of what a client may send of its own trace; anything longer is ignored."""

_PROPAGATOR = TraceContextTextMapPropagator()


class Span:
    """One span. Seconds are of this process's monotonic clock.

    Args:
        span: OpenTelemetry's.
        tracer: makes its children.
        epoch: nanoseconds of the wall clock at which the monotonic one read 0.
    """

    __slots__ = ("_context", "_epoch", "_span", "_tracer")

    def __init__(self, span: trace.Span, tracer: trace.Tracer, epoch: int) -> None:
        self._span = span
        self._tracer = tracer
        self._epoch = epoch
        self._context: Context | None = None

    @property
    def recorded(self) -> bool:
        """Whether anybody will see it."""
        return self._span.is_recording()

    @property
    def traceparent(self) -> str:
        """For who goes on with its work."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def child(
        self,
        name: str,
        start: float,
        attributes: Attributes | None = None,
        *,
        link: Span | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """A span under this one; ``link`` is what it follows from."""
        if self._context is None:
            self._context = trace.set_span_in_context(self._span, Context())
        links = [] if link is None else [trace.Link(link._span.get_span_context())]
        made = self._tracer.start_span(
            name, self._context, kind, attributes, links, start_time=self._at(start), record_exception=False
        )
        return Span(made, self._tracer, self._epoch)

    def note(
        self,
        name: str,
        start: float,
        end: float,
        attributes: Attributes | None = None,
        events: Sequence[tuple[str, float, Attributes]] = (),
    ) -> None:
        """A span under this one that is over; ``events`` are names, times and attributes."""
        made = self.child(name, start, attributes)
        for event in events:
            made.event(*event)
        made.end(max(start, end))

    def event(self, name: str, at: float, attributes: Attributes | None = None) -> None:
        """Something that happened."""
        self._span.add_event(name, attributes, self._at(at))

    def add(self, attributes: Attributes) -> None:
        """Further attributes."""
        self._span.set_attributes(attributes)

    def fail(self, code: str, message: str = "", *, ours: bool = True) -> None:
        """It did not end well; ``ours`` is false where only who asked can mend that."""
        self._span.set_attribute(ERROR_TYPE, code)
        if ours:
            self._span.set_status(StatusCode.ERROR, message or code)

    def end(self, at: float) -> None:
        """It is over."""
        self._span.end(self._at(at))

    def _at(self, seconds: float) -> int:
        return self._epoch + int(seconds * 1e9)


class Tracer:
    """The spans of a process.

    Args:
        config: how they leave it.
        role: of the process; only a router's begins traces, the others go on with them.
        instance: its name.

    Raises:
        ConfigError: a variable of the environment cannot be used.
    """

    def __init__(self, config: TracingConfig, role: str, instance: str) -> None:
        try:
            inner = OTLPSpanExporter(endpoint=config.url or None)
            self._exporter = CountedExporter(inner)
            self._queue = SpanQueue(self._exporter, int(os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE, QUEUED_SPANS)))
        except (ValueError, RuntimeError, OSError) as error:
            raise ConfigError(f"tracing cannot begin with these OTEL_ variables: {error}", field="tracing") from error
        # The SDK takes a sampler that is None from its own variables.
        self._provider = TracerProvider(
            sampler=_sampler(config, role),
            resource=Resource.create(_resource(config, role, instance)),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(self._queue)
        self._tracer = self._provider.get_tracer("kvferry", version("kvferry"))
        self.prompts = config.prompts

    @property
    def exported(self) -> int:
        """Spans that the collector has taken."""
        return self._exporter.exported

    @property
    def dropped(self) -> int:
        """Spans that were lost: the queue was full, or the collector did not take them."""
        return self._queue.lost

    def enter(
        self, name: str, at: float, attributes: Attributes | None = None, *, traceparent: str = "", tracestate: str = ""
    ) -> Span:
        """The first span of this process for a request that has come in.

        Args:
            name: of the span.
            at: when it came.
            attributes: what is known by then.
            traceparent: the span of who asked, as W3C's Trace Context writes it; what is none is ignored.
            tracestate: what vendors have said beside it, likewise.
        """
        told = {}
        if traceparent and len(traceparent) <= LONGEST_PARENT:
            told["traceparent"] = traceparent
            if tracestate and len(tracestate) <= LONGEST_STATE:
                told["tracestate"] = tracestate
        context = _PROPAGATOR.extract(told, Context())
        epoch = time.time_ns() - time.monotonic_ns()
        made = self._tracer.start_span(
            name, context, SpanKind.SERVER, attributes, start_time=epoch + int(at * 1e9), record_exception=False
        )
        return Span(made, self._tracer, epoch)

    async def close(self) -> None:
        """Export what is left, within a bound; no thread stays unless the collector holds it."""
        ending = threading.Thread(target=self._provider.shutdown, name="tracing-end", daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, CLOSE_TIMEOUT)
        if ending.is_alive():
            self._exporter.shutdown()
            await asyncio.to_thread(ending.join, CLOSE_TIMEOUT)


def _sampler(config: TracingConfig, role: str) -> Sampler | None:
    if role != "router":
        return ParentBased(ALWAYS_OFF)
    return None if config.sample_ratio is None else ParentBased(TraceIdRatioBased(config.sample_ratio))


def _resource(config: TracingConfig, role: str, instance: str) -> dict[str, str]:
    known = {"service.instance.id": instance, "service.namespace": "kvferry", "service.version": version("kvferry")}
    if config.service_name or not os.environ.get(OTEL_SERVICE_NAME):
        known["service.name"] = f"{config.service_name or 'kvferry'}-{role}"
    return known
