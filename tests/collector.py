"""A receiver of OTLP over HTTP, as collectors have it: what it was sent, decoded by OpenTelemetry's own protobufs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Sent

PATIENCE = 20.0


@dataclass(frozen=True)
class Seen:
    """One span."""

    service: str
    resource: dict[str, object]
    name: str
    trace: str
    span: str
    parent: str
    kind: int
    start: int
    end: int
    attributes: dict[str, object]
    events: list[tuple[str, int, dict[str, object]]]
    links: list[str]
    error: bool
    status: str


class Collector:
    """What was received.

    Attributes:
        url: without the path.
        spans: in the order that they came.
        requests: their paths and headers.
        answer: status of the next answers.
        held: while it is not set, nothing is answered.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Seen] = []
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.answer = 200
        self.held = threading.Event()
        self.held.set()

    def named(self, name: str, trace: str | None = None) -> list[Seen]:
        return [span for span in list(self.spans) if span.name == name and trace in (None, span.trace)]

    def under(self, parent: Seen) -> list[Seen]:
        """The spans under another, in the order of their beginning."""
        return sorted((span for span in list(self.spans) if span.parent == parent.span), key=lambda span: span.start)

    def wait(self, condition: Callable[[], object]) -> None:
        limit = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < limit, [(span.service, span.name) for span in self.spans]
            time.sleep(0.005)


@contextmanager
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            found.requests.append((self.path, {key.lower(): value for key, value in self.headers.items()}))
            found.held.wait(PATIENCE)
            if found.answer == 200:
                found.spans += spans_of(ExportTraceServiceRequest.FromString(body))
            self.send_response(found.answer)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    found = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        found.held.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def receiving(patch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector, and processes that send what they have at once, and straight to it."""
    patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    patch.setenv("NO_PROXY", "127.0.0.1")
    with collector() as found:
        yield found


def spans_of(request: ExportTraceServiceRequest) -> Iterator[Seen]:
    for sent in request.resource_spans:
        resource = values(sent.resource.attributes)
        for scope in sent.scope_spans:
            for span in scope.spans:
                yield seen(span, resource)


def seen(span: Sent, resource: dict[str, object]) -> Seen:
    return Seen(
        service=str(resource["service.name"]),
        resource=resource,
        name=span.name,
        trace=span.trace_id.hex(),
        span=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        kind=span.kind,
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=values(span.attributes),
        events=[(event.name, event.time_unix_nano, values(event.attributes)) for event in span.events],
        links=[link.span_id.hex() for link in span.links],
        error=span.status.code == span.status.STATUS_CODE_ERROR,
        status=span.status.message,
    )


def values(attributes: object) -> dict[str, object]:
    return {pair.key: value(pair.value) for pair in attributes if isinstance(pair, KeyValue)}  # type: ignore[attr-defined]


def value(told: AnyValue) -> object:
    kind = told.WhichOneof("value")
    if kind == "array_value":
        return [value(each) for each in told.array_value.values]
    return None if kind is None else getattr(told, kind)
