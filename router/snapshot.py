"""Makes the router's overview out of what it knows at one moment; decides and computes, and keeps nothing."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Sequence

import msgspec
from prometheus_client import Counter, Histogram
from prometheus_client.samples import Sample

from protocol.transfer_counts import TransferCounts
from router.breaker import BreakerState, BreakerView
from router.front.errors import without_addresses
from router.live_request import LiveRequest
from router.metrics import RouterMetrics
from router.overview import (
    Alert,
    ClassOverview,
    Handoffs,
    Latency,
    LiveStates,
    RouterTotals,
    TransportUse,
    Unserved,
    WorkerBreaker,
    WorkerOverview,
)
from router.registry import Worker
from router.request_table import RequestState
from router.slo.classes import SLOConfig
from router.slo.metrics import AdmissionMetrics
from router.slo.ticket import TicketState


def worker_overview(worker: Worker, breaker: BreakerView, now: float) -> WorkerOverview:
    """One worker at ``now`` (monotonic seconds)."""
    profile = worker.profile
    state = "lost" if not worker.live else "draining" if worker.load.draining else "live"
    return WorkerOverview(
        name=worker.peer.name,
        incarnation=worker.peer.incarnation,
        role=profile.role,
        state=state,
        reason=worker.lost,
        breaker=WorkerBreaker(
            state=breaker.state.value, reason=without_addresses(breaker.reason), openings=breaker.openings
        ),
        last_seen_s=round(now - worker.last_seen, 3),
        device=profile.device,
        pid=profile.pid,
        max_model_len=profile.max_model_len,
        num_blocks=profile.num_blocks,
        max_sequences=profile.max_sequences,
        layout=msgspec.to_builtins(profile.layout),
        load=worker.load,
        leaked_blocks=worker.load.pool.leaked,
        handoffs=_handoffs(worker.transfer),
    )


def _handoffs(counts: TransferCounts) -> Handoffs:
    return Handoffs(
        opened=counts.opened,
        open=counts.open,
        draining=counts.draining,
        ended={str(outcome): count for outcome, count in counts.ended.items()},
        transports={
            scheme: TransportUse(ships=path.ship_bytes.count, kv_bytes=int(path.ship_bytes.total))
            for scheme, path in counts.paths.items()
        },
    )


def alerts_of(workers: Iterable[WorkerOverview], lack: str | None) -> tuple[Alert, ...]:
    """What somebody should look at; ``lack`` is why no new request can be served, if that is so."""
    found = []
    if lack is not None:
        found.append(Alert(kind="unready", worker=None, text=f"no new request can be served: {lack}"))
    for worker in workers:
        name = worker.name
        if worker.state == "lost":
            text = f"{name} is lost: {worker.reason or 'no reason is known'}"
            found.append(Alert(kind="lost", worker=name, text=text))
        elif worker.breaker.state != BreakerState.CLOSED.value:
            text = f"{name} gets no usual work, its breaker is {worker.breaker.state}: {worker.breaker.reason}"
            found.append(Alert(kind="breaker", worker=name, text=text))
        if worker.leaked_blocks:
            found.append(Alert(kind="leak", worker=name, text=f"{name} has {worker.leaked_blocks} leaked blocks"))
    return tuple(found)


def live_states(requests: Iterable[LiveRequest]) -> LiveStates:
    """Where the requests under way are."""
    return LiveStates(**Tally(live.machine.state.value for live in requests))


def unserved(requests: Iterable[LiveRequest], metrics: RouterMetrics) -> Unserved:
    """What of all that was asked for no worker has."""
    waiting = [each for each in requests if each.machine.state is RequestState.QUEUED and not _patient(each)]
    prompts = {id(each if each.ticket is None else each.ticket): len(each.generation.token_ids) for each in waiting}
    return Unserved(
        waiting=len(prompts),
        waiting_tokens=sum(prompts.values()),
        refused=_total(metrics.admission.refusals),
        refused_tokens=_total(metrics.admission.refused_prompt_tokens),
    )


def _patient(live: LiveRequest) -> bool:
    """Whether it waits for its turn in a class that has time."""
    ticket = live.ticket
    return ticket is not None and ticket.state is TicketState.WAITING and ticket.patient


def class_overviews(slo: SLOConfig, metrics: AdmissionMetrics) -> tuple[ClassOverview, ...]:
    """What waits, and what was counted, of each class; none where requests do not wait for their turn."""
    if not slo.active:
        return ()
    admitted = {sample.labels["class"]: int(sample.value) for sample in _totals(metrics.admissions)}
    refused: dict[str, dict[str, int]] = {name: {} for name in slo.names}
    for sample in _totals(metrics.refusals):
        refused[sample.labels["class"]][sample.labels["reason"]] = int(sample.value)
    outcomes: dict[str, dict[str, dict[str, int]]] = {name: {"kept": {}, "missed": {}} for name in slo.names}
    for sample in _totals(metrics.targets):
        labels = sample.labels
        outcomes[labels["class"]][labels["outcome"]][labels["target"]] = int(sample.value)
    return tuple(
        ClassOverview(
            name=name,
            ttft_s=slo.of(name).ttft,
            tpot_s=slo.of(name).tpot,
            waiting=metrics.waiting(name),
            admitted=admitted.get(name, 0),
            refused=refused[name],
            **outcomes[name],
        )
        for name in slo.names
    )


def router_totals(metrics: RouterMetrics) -> RouterTotals:
    """What the router has counted since it began."""
    ended: dict[str, dict[str, int]] = {}
    for sample in _totals(metrics.requests):
        ended.setdefault(sample.labels["outcome"], {})[sample.labels["code"]] = int(sample.value)
    return RouterTotals(
        ended=ended,
        retries={sample.labels["code"]: int(sample.value) for sample in _totals(metrics.retries)},
        prompt_tokens=_total(metrics.prompt_tokens),
        output_tokens=_total(metrics.output_tokens),
        handoffs=_total(metrics.handoffs),
        remote_prefills=_total(metrics.remote_prefills),
        local_prefills=_total(metrics.local_prefills),
    )


def latencies(metrics: RouterMetrics) -> dict[str, Latency]:
    """The router's histograms by name."""
    return {
        "ttft": _latency(metrics.ttft),
        "tpot": _latency(metrics.tpot),
        "handoff": _latency(metrics.handoff),
        "queue": _latency(metrics.queue),
        "e2e": _latency(metrics.e2e),
    }


def _latency(histogram: Histogram) -> Latency:
    samples = _samples(histogram)
    buckets = [sample for sample in samples if sample.name.endswith("_bucket")]
    reached = [int(bucket.value) for bucket in buckets]
    return Latency(
        bounds=tuple(float(bucket.labels["le"]) for bucket in buckets[:-1]),
        counts=tuple(upto - below for below, upto in zip((0, *reached), reached, strict=False)),
        total_s=next(sample.value for sample in samples if sample.name.endswith("_sum")),
    )


def _total(counter: Counter) -> int:
    return int(sum(sample.value for sample in _totals(counter)))


def _totals(counter: Counter) -> list[Sample]:
    return [sample for sample in _samples(counter) if sample.name.endswith("_total")]


def _samples(metric: Counter | Histogram) -> Sequence[Sample]:
    (family,) = metric.collect()
    return family.samples
