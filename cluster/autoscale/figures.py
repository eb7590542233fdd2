"""What a router has counted of its requests, and heard of its workers, at one moment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from protocol.ids import Role
from protocol.messages import WorkerLoad
from router.client import ClusterOverview
from router.overview import Unserved


class WorkerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, as its last heartbeat has it.

    Attributes:
        name, incarnation: of it.
        role: that it has.
        block_size: tokens of a block of its pool.
        max_sequences: that a step of it takes at most; 0 where that is not told.
        load: what it does.
    """

    name: str
    incarnation: int
    role: Role
    block_size: int
    max_sequences: int = 0
    load: WorkerLoad

    @property
    def work(self) -> float:
        """What it has to do, to be compared with others of its role."""
        return self.load.running + self.load.waiting + self.load.waiting_tokens


class RouterFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Counters grow from the router's start.

    Attributes:
        firsts, firsts_met: first tokens, and those that came within the target.
        answers, answers_met: answers of more than a token, and those whose further tokens came within the target.
        workers: those that live.
        unserved: what waits in the router, and was refused.
    """

    firsts: float
    firsts_met: float
    answers: float
    answers_met: float
    workers: tuple[WorkerFigures, ...]
    unserved: Unserved = Unserved()


def figures_of(overview: ClusterOverview, exposition: str, *, ttft: float, tpot: float) -> RouterFigures:
    """What ``/cluster`` and ``/metrics`` say of a router.

    Args:
        overview: the one.
        exposition: the other.
        ttft: seconds to the first token, the target; within a bucket times are taken to be spread evenly.
        tpot: seconds per further token, likewise.
    """
    families = {family.name: family for family in text_string_to_metric_families(exposition)}
    firsts, firsts_met = _within(families.get("kvferry_ttft_seconds"), ttft)
    answers, answers_met = _within(families.get("kvferry_tpot_seconds"), tpot)
    workers = tuple(_workers(overview))
    return RouterFigures(
        firsts=firsts,
        firsts_met=firsts_met,
        answers=answers,
        answers_met=answers_met,
        workers=workers,
        unserved=overview.unserved,
    )


def _workers(overview: ClusterOverview) -> Iterator[WorkerFigures]:
    for worker in overview.workers:
        if worker.state == "lost" or worker.role not in ("prefill", "decode"):
            continue
        yield WorkerFigures(
            name=worker.name,
            incarnation=worker.incarnation,
            role="prefill" if worker.role == "prefill" else "decode",
            block_size=int(worker.layout["block_size"]),
            max_sequences=worker.max_sequences,
            load=worker.load,
        )


def _within(family: Metric | None, limit: float) -> tuple[float, float]:
    """How many a histogram has, and how many of them within ``limit``."""
    samples: Iterable[tuple[float, float]] = () if family is None else _buckets(family)
    below, met, before = 0.0, 0.0, 0.0
    for bound, count in samples:
        if bound <= limit:
            met = count
        elif before < limit:
            share = 0.0 if math.isinf(bound) else (limit - before) / (bound - before)
            met = below + share * (count - below)
        below, before = count, bound
    return below, met


def _buckets(family: Metric) -> list[tuple[float, float]]:
    return sorted((float(each.labels["le"]), each.value) for each in family.samples if each.name.endswith("_bucket"))
