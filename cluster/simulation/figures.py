"""What came of a run, as values: written as JSON, printed as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from cluster.simulation.record import Outcome, Records
from cluster.simulation.scenario import Scenario
from cluster.simulation.simulated_worker import Tally
from router.placer import Placer

VERSION = 2
CURVE = tuple(range(101))
"""Percentiles that are kept for a picture."""


class Spread(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one kind of times, in seconds; all are 0 where there are none.

    Attributes:
        mean, p50, p90, p99: of the samples.
        curve: every percentile from 0 to 100.
    """

    mean: float
    p50: float
    p90: float
    p99: float
    curve: tuple[float, ...]

    @property
    def most(self) -> float:
        """The largest sample."""
        return max(self.curve, default=0.0)


class TenantFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of one tenant's requests.

    Attributes:
        tenant: its name.
        requests, finished, refused: how many came, and what became of them.
        good: share of those that came which met both targets.
        served: its share of all tokens of requests that finished.
        ttft: of those that finished.
    """

    tenant: str
    requests: int
    finished: int
    refused: int
    good: float
    served: float
    ttft: Spread


class Figures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One policy on one trace.

    Attributes:
        policy: its name.
        requests, finished, refused, failed: how many came, and what became of them.
        retries: attempts beyond the first of each.
        ttft, tpot, e2e: of those that finished; tpot of those with more than one token.
        good, goodput: share of all that came which met both targets, and how many a second those were.
        rate: requests that came a second.
        cached: share of prompt tokens that those had who computed the prompts.
        local: share of first tokens that came from decode workers.
        prefill_load, decode_load: what the busiest worker of a role did, by the mean of them: seconds in steps of
            prefill, tokens of decode.
        prefill_busy, decode_busy: share of the time that workers were in steps, in the mean.
        prediction_error: mean of how far a first attempt's predicted time to the first token was off, by the mean of
            what it was.
        simulated: seconds that passed in it.
        cpu_seconds: that it took.
        events, messages: that happened, and that routers heard.
        indexed: blocks that the routers knew of in the end, and the bytes of their indexes.
        tenants: of each, where there are several.
    """

    policy: str
    requests: int
    finished: int
    refused: int
    failed: int
    retries: int
    ttft: Spread
    tpot: Spread
    e2e: Spread
    good: float
    goodput: float
    rate: float
    cached: float
    local: float
    prefill_load: float
    decode_load: float
    prefill_busy: float
    decode_busy: float
    prediction_error: float
    simulated: float
    cpu_seconds: float
    events: int
    messages: int
    indexed: tuple[int, int]
    tenants: tuple[TenantFigures, ...] = ()


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a command.

    Attributes:
        version: of this format.
        trace, requests, rates, seed, profile, workers, routers, link_gbps, ttft_target, local_prefill,
            admission, tenants, ttft, tpot, failures: as asked for, or taken where they were not.
        figures: of each policy, one rate after the other.
    """

    version: int = VERSION
    kvferry: str
    trace: str
    requests: int
    rates: tuple[float | None, ...]
    seed: int
    profile: str
    workers: str
    routers: int
    link_gbps: float
    ttft_target: float
    local_prefill: str
    admission: bool
    tenants: str
    ttft: float
    tpot: float
    failures: str
    figures: tuple[Figures, ...]


def figures_of(
    scenario: Scenario,
    records: Records,
    tallies: Mapping[str, Tally],
    *,
    simulated: float,
    seconds: float,
    events: int,
    messages: int,
    placers: Sequence[Placer],
) -> Figures:
    """What a run comes to."""
    count = records.ended
    outcome = records.outcome[:count]
    ttft, tpot, at = records.ttft[:count], records.tpot[:count], records.at[:count]
    finished = outcome == Outcome.FINISHED
    good = finished & (ttft <= scenario.ttft) & (np.isnan(tpot) | (tpot <= scenario.tpot))
    span = max(float(np.ptp(at)) if count else 0.0, 1e-9)
    prefill = [tally for name, tally in tallies.items() if name.startswith("prefill")]
    decode = [tally for name, tally in tallies.items() if name.startswith("decode")]
    whole = Tally()
    for tally in tallies.values():
        whole.prompts += tally.prompts
        whole.prompt_tokens += tally.prompt_tokens
        whole.found += tally.found
    known = ~np.isnan(records.predicted[:count]) & ~np.isnan(ttft)
    off = np.abs(records.predicted[:count] - ttft)[known]
    return Figures(
        policy=scenario.policy,
        requests=count,
        finished=int(finished.sum()),
        refused=int((outcome == Outcome.REFUSED).sum()),
        failed=int((outcome == Outcome.FAILED).sum()),
        retries=records.retries,
        ttft=_spread(ttft[finished]),
        tpot=_spread(tpot[finished & ~np.isnan(tpot)]),
        e2e=_spread(records.e2e[:count][finished]),
        good=float(good.sum()) / max(1, count),
        goodput=float(good.sum()) / span,
        rate=count / span,
        cached=whole.found / max(1, whole.found + whole.prompt_tokens),
        local=sum(tally.prompts for tally in decode) / max(1, whole.prompts),
        prefill_load=_uneven([tally.busy for tally in prefill]),
        decode_load=_uneven([float(tally.tokens) for tally in decode]),
        prefill_busy=sum(tally.busy for tally in prefill) / len(prefill) / max(simulated, 1e-9),
        decode_busy=sum(tally.busy for tally in decode) / len(decode) / max(simulated, 1e-9),
        prediction_error=float(off.mean() / max(ttft[known].mean(), 1e-9)) if off.size else 0.0,
        simulated=simulated,
        cpu_seconds=seconds,
        events=events,
        messages=messages,
        indexed=(sum(each.index.blocks for each in placers), sum(each.index.nbytes for each in placers)),
        tenants=_by_tenant(records, good) if len(records.tenants) > 1 else (),
    )


def _by_tenant(records: Records, good: NDArray[np.bool_]) -> tuple[TenantFigures, ...]:
    count = records.ended
    outcome, tokens, tenant = records.outcome[:count], records.tokens[:count], records.tenant[:count]
    finished = outcome == Outcome.FINISHED
    every = max(1, int(tokens[finished].sum()))
    found = []
    for number, name in enumerate(records.tenants):
        mine = tenant == number
        found.append(
            TenantFigures(
                tenant=name,
                requests=int(mine.sum()),
                finished=int((mine & finished).sum()),
                refused=int((mine & (outcome == Outcome.REFUSED)).sum()),
                good=float(good[mine].sum()) / max(1, int(mine.sum())),
                served=int(tokens[mine & finished].sum()) / every,
                ttft=_spread(records.ttft[:count][mine & finished]),
            )
        )
    return tuple(found)


def _spread(samples: NDArray[np.float64]) -> Spread:
    if not samples.size:
        return Spread(mean=0.0, p50=0.0, p90=0.0, p99=0.0, curve=())
    curve = tuple(np.percentile(samples, CURVE, method="inverted_cdf").tolist())
    return Spread(mean=float(samples.mean()), p50=curve[50], p90=curve[90], p99=curve[99], curve=curve)


def _uneven(loads: Sequence[float]) -> float:
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0


def simulation_table(figures: Sequence[Figures]) -> Table:
    """A row for each policy and rate."""
    table = Table(box=None, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for heading in (
        *("req/s", "TTFT ms", "p50", "p99", "most", "TPOT ms", "p99", "good %", "good/s", "cached %"),
        *("P load", "D load", "busy %", "refused", "failed", "error %"),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in figures:
        table.add_row(
            each.policy,
            f"{each.rate:.4g}",
            *(f"{1e3 * value:.4g}" for value in (each.ttft.mean, each.ttft.p50, each.ttft.p99, each.ttft.most)),
            *(f"{1e3 * value:.3g}" for value in (each.tpot.mean, each.tpot.p99)),
            *(f"{100 * each.good:.1f}", f"{each.goodput:.4g}", f"{100 * each.cached:.1f}"),
            *(f"{each.prefill_load:.2f}", f"{each.decode_load:.2f}", f"{100 * each.prefill_busy:.0f}"),
            *(str(each.refused), str(each.failed), f"{100 * each.prediction_error:.0f}"),
        )
    return table


def tenant_table(figures: Sequence[Figures]) -> Table:
    """A row for each tenant of each run."""
    table = Table(box=None, pad_edge=False)
    for heading in ("policy", "tenant"):
        table.add_column(heading, no_wrap=True)
    for heading in ("req/s", "requests", "refused", "tokens %", "good %", "TTFT ms", "p99"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in figures:
        for mine in each.tenants:
            table.add_row(
                each.policy,
                mine.tenant,
                f"{each.rate * mine.requests / max(1, each.requests):.4g}",
                *(str(mine.requests), str(mine.refused)),
                *(f"{100 * mine.served:.1f}", f"{100 * mine.good:.1f}"),
                *(f"{1e3 * value:.4g}" for value in (mine.ttft.mean, mine.ttft.p99)),
            )
    return table


def remarks(report: SimulationReport) -> list[str]:
    """What has to be known to read it."""
    first = report.figures[0]
    return [
        f"good: first token within {report.ttft:g} s and {report.tpot:g} s a further one, of all that came",
        "load: the busiest worker of a role by the mean of them; busy: of prefill; error: of the predicted TTFT",
        f"{first.requests} requests, {first.rate:.4g} a second, {first.simulated:.4g} s simulated in "
        f"{first.cpu_seconds:.3g} s of CPU: {first.events} events, {first.messages} messages to routers",
        *(
            f"{each.policy}: {100 * each.local:.3g} % of prompts were computed on decode workers"
            for each in report.figures
            if each.local
        ),
    ]
