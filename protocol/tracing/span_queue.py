"""Spans on their way out: a bounded queue before a thread of the SDK's own, and the count of what did not get out.

Life cycle: made running, closed once. Whoever ends a span never waits: one that finds the queue full is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult


class CountedExporter(SpanExporter):
    """Another exporter, with what became of the spans. Spans come from one thread.

    Args:
        inner: exports.

    Attributes:
        taken: spans that have left the queue.
        exported: spans that the collector has taken.
    """

    def __init__(self, inner: SpanExporter) -> None:
        self.taken = 0
        self.exported = 0
        self._inner = inner
        self._closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export; every span is out of the queue from now on."""
        result = SpanExportResult.FAILURE if self._closed else self._inner.export(spans)
        self.exported += len(spans) if result is SpanExportResult.SUCCESS else 0
        self.taken += len(spans)
        return result

    def shutdown(self) -> None:
        """Give up what is under way; may be called again."""
        if not self._closed:
            self._closed = True
            self._inner.shutdown()


class SpanQueue(SpanProcessor):
    """See the module. One thread ends spans.

    Args:
        exporter: where spans go.
        bound: spans at most that wait or are being sent.

    Attributes:
        refused: spans that found the queue full.
    """

    def __init__(self, exporter: CountedExporter, bound: int) -> None:
        self.refused = 0
        self._exporter = exporter
        self._bound = bound
        self._accepted = 0
        # The SDK's own queue of that length would drop without a count; it never fills.
        self._batches = BatchSpanProcessor(exporter, max_queue_size=bound)

    @property
    def lost(self) -> int:
        """Spans that were dropped, or that the collector did not take."""
        return self.refused + self._exporter.taken - self._exporter.exported

    def on_end(self, span: ReadableSpan) -> None:
        """A span is over."""
        if self._accepted - self._exporter.taken >= self._bound:
            self.refused += 1
            return
        self._accepted += 1
        self._batches.on_end(span)

    def shutdown(self) -> None:
        """Export what is here, and end the thread."""
        self._batches.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Export what is here."""
        return self._batches.force_flush(timeout_millis)
