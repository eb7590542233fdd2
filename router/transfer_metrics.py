"""The metrics of the handoffs, out of what the workers' heartbeats count: ``kvferry_transfer_...``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from protocol.histogram import Histogram, Scale
from protocol.transfer_counts import SCALES, TransferCounts
from router.registry import Worker

_HISTOGRAMS = {
    "grant_wait": (
        "kvferry_transfer_grant_wait_seconds",
        "Opening of a lease to its grant, observed when the lease ends.",
    ),
    "ship_seconds": ("kvferry_transfer_ship_seconds", "A ship, from the call to its last acknowledgement."),
    "ship_bytes": ("kvferry_transfer_ship_bytes", "Bytes of a ship."),
    "ship_spans": ("kvferry_transfer_ship_spans", "Runs of adjacent bytes that a ship is made of."),
    "ship_rate": ("kvferry_transfer_ship_bytes_per_second", "Bytes of a ship by the seconds that it took."),
    "settle": ("kvferry_transfer_settle_seconds", "Hand-over record to the reader's settlement."),
}
"""Name and meaning of each histogram of ``PathCounts``."""

_SIDES = {"leases": "prefill", "imports": "decode"}


def transfer_metrics(workers: Sequence[Worker]) -> Iterator[Metric]:
    """One family for each metric.

    Counters and histograms speak of lost workers too, so that what went wrong before a death is not lost with it;
    gauges of live ones alone.
    """
    totals = {worker.peer.name: worker.totals.transfer for worker in workers}
    prefill = {worker.peer.name: totals[worker.peer.name] for worker in workers if worker.profile.role == "prefill"}
    for field, (name, text) in _HISTOGRAMS.items():
        yield _histogram(name, text, SCALES[field], field, prefill)
    for side, role in _SIDES.items():
        yield from _lives(side, [worker for worker in workers if worker.profile.role == role], totals)
    yield _by_code(
        "kvferry_transfer_refusals",
        "Grants and renewals that were refused, for there was no lease for them.",
        ((name, counts.refusals) for name, counts in prefill.items()),
    )
    broken = CounterMetricFamily(
        "kvferry_transfer_broken_ships",
        "Ships that failed (prefill), or broke off while they landed (decode), by error.",
        labels=("worker", "role", "transport", "code"),
    )
    for worker in workers:
        counts = totals[worker.peer.name]
        by_path = [("", counts.broken), *((name, path.broken) for name, path in counts.paths.items())]
        for transport, codes in by_path:
            for code, count in codes.items():
                broken.add_metric((worker.peer.name, worker.profile.role, transport, code), count)
    yield broken


def _histogram(name: str, text: str, scale: Scale, field: str, workers: Mapping[str, TransferCounts]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=("worker", "transport"))
    for worker, counts in workers.items():
        for transport, path in sorted(counts.paths.items()):
            histogram: Histogram = getattr(path, field)
            if histogram.count:
                family.add_metric((worker, transport), buckets(histogram, scale), histogram.total)
    return family


def buckets(histogram: Histogram, scale: Scale) -> list[tuple[str, float]]:
    """The values of a histogram in Prometheus' form: each bound, with how many are not above it."""
    bounds = (*map(floatToGoString, scale.bounds), "+Inf")
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))


def _lives(side: str, workers: Sequence[Worker], totals: Mapping[str, TransferCounts]) -> Iterator[Metric]:
    opened = CounterMetricFamily(
        f"kvferry_transfer_{side}_opened", f"{side.capitalize()} that were opened.", labels=("worker",)
    )
    ended = CounterMetricFamily(
        f"kvferry_transfer_{side}_ended", f"{side.capitalize()} that ended, by outcome.", labels=("worker", "outcome")
    )
    now = GaugeMetricFamily(
        f"kvferry_transfer_{side}",
        f"{side.capitalize()} that are open, or that ended and whose blocks the transport may still touch.",
        labels=("worker", "state"),
    )
    for worker in workers:
        name, counts = worker.peer.name, totals[worker.peer.name]
        opened.add_metric((name,), counts.opened)
        for outcome, count in sorted(counts.ended.items()):
            ended.add_metric((name, outcome), count)
        if worker.live:
            now.add_metric((name, "open"), worker.transfer.open)
            now.add_metric((name, "draining"), worker.transfer.draining)
    yield from (opened, ended, now)


def _by_code(name: str, text: str, rows: Iterable[tuple[str, Mapping[str, int]]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=("worker", "code"))
    for worker, codes in rows:
        for code, count in sorted(codes.items()):
            family.add_metric((worker, code), count)
    return family
