"""What a load test found, as values. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from cluster.bench.machine import Machine
from cluster.bench.serve.answer import Record
from cluster.bench.serve.dialect import Dialect
from cluster.bench.serve.target import Target
from cluster.bench.statistics import percentile
from cluster.bench.traces.options import TraceOptions

VERSION = 1


class Spread(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of many times, in seconds; percentiles by nearest rank."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    worst: float
    samples: int


class ServerFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one server made of the trace; times in seconds, rates per second.

    Attributes:
        url, model, dialect: who was asked, and how.
        requests: sent.
        completed: of them answered to the end.
        errors: how many failed, by kind.
        asked_rate: requests, as the trace has them; None where a fixed number was under way.
        sent_rate: as they were really sent.
        completed_rate: as they were answered, from the first sent to the last answered.
        seconds: that this took, over all slices.
        prompt_tokens, output_tokens: of what was completed.
        wanted_tokens: of the same answers, as the trace has them.
        events: that output tokens came in; fewer where the server joins some.
        late: how long after its time each request was sent: the generator's own fault.
        ttft, tpot, e2e: of what was completed, from when it should have been sent.
        gap: between two events of one answer (ITL).
        good: within the targets; None without targets.
        goodput: of those.
    """

    url: str
    model: str
    dialect: Dialect
    requests: int
    completed: int
    errors: dict[str, int]
    asked_rate: float | None
    sent_rate: float
    completed_rate: float
    seconds: float
    prompt_tokens: int
    output_tokens: int
    wanted_tokens: int
    events: int
    late: Spread
    ttft: Spread | None
    tpot: Spread | None
    gap: Spread | None
    e2e: Spread | None
    good: int | None
    goodput: float | None


class Versus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first server to the second: below 1 the first is faster, but for ``output`` and ``goodput``.

    Attributes:
        pairs: requests that both have completed.
        ttft, tpot, e2e: median over these of the first's time to the second's for the same request.
        output: output tokens a second.
        goodput: None without targets, or where the second has none.
    """

    pairs: int
    ttft: float | None
    tpot: float | None
    e2e: float | None
    output: float | None
    goodput: float | None


class ServeReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run.

    Attributes:
        version: of this format.
        kvferry: version.
        machine: that the load came from.
        trace: what was played.
        concurrency: under way at a time; None for an open loop.
        slice: requests that a server had before it was the other's turn; None for one server.
        salt: with it, prompts of the same trace are the same again.
        target: that answers were held to.
        cpu: share of a core that the generator used.
        servers: one or two.
        versus: of two.
        records: of each server, in the order of the trace.
    """

    version: int = VERSION
    kvferry: str
    machine: Machine
    trace: TraceOptions
    concurrency: int | None
    slice: int | None
    salt: str
    target: Target | None
    cpu: float
    servers: tuple[ServerFigures, ...]
    versus: Versus | None
    records: tuple[tuple[Record, ...], ...]


@dataclass(slots=True)
class Taken:
    """What is gathered of one server while a run goes on.

    Attributes:
        records, gaps: of its requests.
        wanted: output tokens asked for, by the place of the request.
        scheduled: seconds from each slice's beginning to the time its last request should have been sent, added up.
        sent: to when it really was.
        seconds: to the end of its last answer.
    """

    records: list[Record] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    wanted: dict[int, int] = field(default_factory=dict)
    scheduled: float = 0.0
    sent: float = 0.0
    seconds: float = 0.0


def spread(values: Iterable[float]) -> Spread | None:
    """Of all values; None of none."""
    found = sorted(values)
    if not found:
        return None
    return Spread(
        mean=statistics.fmean(found),
        p50=percentile(found, 50),
        p90=percentile(found, 90),
        p95=percentile(found, 95),
        p99=percentile(found, 99),
        worst=found[-1],
        samples=len(found),
    )


def figures_of(
    taken: Taken, *, url: str, model: str, dialect: Dialect, open_loop: bool, target: Target | None
) -> ServerFigures:
    """The figures of one server, which was sent at least one request."""
    done = [record for record in taken.records if record.error is None]
    good = None if target is None else sum(is_good(record, target) for record in done)
    late = spread(record.late for record in taken.records)
    assert late is not None, "a request was sent"
    return ServerFigures(
        url=url,
        model=model,
        dialect=dialect,
        requests=len(taken.records),
        completed=len(done),
        errors=dict(sorted(Counter(record.error for record in taken.records if record.error is not None).items())),
        asked_rate=_rate(len(taken.records), taken.scheduled) if open_loop else None,
        sent_rate=_rate(len(taken.records), taken.sent),
        completed_rate=_rate(len(done), taken.seconds),
        seconds=taken.seconds,
        prompt_tokens=sum(record.prompt_tokens for record in done),
        output_tokens=sum(record.output_tokens for record in done),
        wanted_tokens=sum(taken.wanted[record.index] for record in done),
        events=sum(record.events for record in done),
        late=late,
        ttft=spread(record.ttft for record in done if record.ttft is not None),
        tpot=spread(record.tpot for record in done if record.tpot is not None),
        gap=spread(taken.gaps),
        e2e=spread(record.e2e for record in done),
        good=good,
        goodput=None if good is None else _rate(good, taken.seconds),
    )


def is_good(record: Record, target: Target) -> bool:
    """Whether a request was answered within the targets."""
    return (
        record.error is None
        and record.ttft is not None
        and target.met(ttft=record.ttft, tpot=record.tpot, e2e=record.e2e)
    )


def versus_of(ours: ServerFigures, theirs: ServerFigures, records: Sequence[Sequence[Record]]) -> Versus:
    """The first of two servers to the second."""
    mine, its = ({record.index: record for record in each if record.error is None} for each in records)
    pairs = [(mine[index], its[index]) for index in sorted(mine.keys() & its.keys())]

    def median(name: str) -> float | None:
        both = [(getattr(one, name), getattr(other, name)) for one, other in pairs]
        ratios = [one / other for one, other in both if one is not None and other]
        return statistics.median(ratios) if ratios else None

    return Versus(
        pairs=len(pairs),
        ttft=median("ttft"),
        tpot=median("tpot"),
        e2e=median("e2e"),
        output=_ratio(_rate(ours.output_tokens, ours.seconds), _rate(theirs.output_tokens, theirs.seconds)),
        goodput=None if ours.goodput is None else _ratio(ours.goodput, theirs.goodput),
    )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0.0 else 0.0


def _ratio(one: float, other: float | None) -> float | None:
    return one / other if other else None
