"""What is counted of admission, by class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.slo.classes import SLOClass

_WAITS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300)


class _Waiting(Collector):
    """Requests that wait, by class."""

    def __init__(self) -> None:
        self.names: Sequence[str] = ()
        self.count: Callable[[str], int] = lambda _: 0

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        text = "Requests that wait in the router for their turn."
        waiting = GaugeMetricFamily("kvferry_admission_waiting", text, labels=("class",))
        for name in self.names:
            waiting.add_metric((name,), self.count(name))
        yield waiting


class AdmissionMetrics:
    """Counters of one router.

    Args:
        registry: that they are exported by.

    Attributes:
        admissions, refusals: requests that start as one, by class; refusals by reason too.
        refused_prompt_tokens: of those that were refused, by class.
        targets: finished requests by class, target and what became of it.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._waiting = _Waiting()
        registry.register(self._waiting)
        self.admissions = Counter("kvferry_admitted", "Requests let in, by class.", ("class",), registry=registry)
        self.refusals = Counter(
            "kvferry_refused",
            "Requests that were answered with 429 for want of room or time, by class and reason.",
            ("class", "reason"),
            registry=registry,
        )
        self.refused_prompt_tokens = Counter(
            "kvferry_refused_prompt_tokens", "Prompt tokens of those requests, by class.", ("class",), registry=registry
        )
        self._waits = Histogram(
            "kvferry_admission_wait_seconds",
            "Arrival to the moment in which a request was let in.",
            ("class",),
            buckets=_WAITS,
            registry=registry,
        )
        self.targets = Counter(
            "kvferry_slo_targets",
            "Finished requests, by what became of each target of their class.",
            ("class", "target", "outcome"),
            registry=registry,
        )

    def watch(self, names: Sequence[str], count: Callable[[str], int]) -> None:
        """Export how many of each class wait."""
        self._waiting.names, self._waiting.count = names, count

    def waiting(self, slo: str) -> int:
        """How many of a class wait."""
        return self._waiting.count(slo)

    def admitted(self, slo: str, waited: float) -> None:
        """Requests that start as one were let in."""
        self.admissions.labels(slo).inc()
        self._waits.labels(slo).observe(waited)

    def refused(self, slo: str, reason: str, prompt: int) -> None:
        """Requests that start as one were refused; ``prompt`` is its tokens."""
        self.refusals.labels(slo, reason).inc()
        self.refused_prompt_tokens.labels(slo).inc(prompt)

    def served(self, slo: SLOClass, ttft: float | None, tpot: float | None) -> None:
        """A request has finished; seconds, where there were any."""
        for name, target, found in (("ttft", slo.ttft, ttft), ("tpot", slo.tpot, tpot)):
            if target and found is not None:
                self.targets.labels(slo.name, name, "kept" if found <= target else "missed").inc()
