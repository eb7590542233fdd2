"""The metrics of spans on their way to a collector: this router's own, and those that its workers have counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from router.registry import Worker


@dataclass(frozen=True, slots=True)
class OwnSpans:
    """What a router has counted of its own spans.

    Attributes:
        router: its name.
        exported: that a collector has taken.
        dropped: that were lost.
    """

    router: str
    exported: int
    dropped: int


class SpanCollector(Collector):
    """Samples of every process that exports spans.

    Args:
        workers: gives all known workers.
        own: gives this router's; None where it exports none.
    """

    def __init__(self, workers: Callable[[], Sequence[Worker]], own: Callable[[], OwnSpans | None]) -> None:
        self._workers = workers
        self._own = own

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are not checked against others, and no scrape is made for it."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """One family for each metric."""
        labels = ("worker", "role")
        exported = CounterMetricFamily("kvferry_spans_exported", "Spans that a collector has taken.", labels=labels)
        dropped = CounterMetricFamily(
            "kvferry_spans_dropped", "Spans that were lost: too many waited, or no collector took them.", labels=labels
        )
        own = self._own()
        if own is not None:
            exported.add_metric((own.router, "router"), own.exported)
            dropped.add_metric((own.router, "router"), own.dropped)
        for worker in self._workers():
            counted = worker.totals.counters
            if counted["spans_exported"] or counted["spans_dropped"]:
                exported.add_metric((worker.peer.name, worker.profile.role), counted["spans_exported"])
                dropped.add_metric((worker.peer.name, worker.profile.role), counted["spans_dropped"])
        yield from (exported, dropped)
