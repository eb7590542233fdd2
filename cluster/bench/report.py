"""What a run found, as values: written as JSON, printed as a table, drawn as a plot."""

from __future__ import annotations

from typing import Literal

import msgspec
from rich.table import Table

from cluster.bench.case import Case
from cluster.bench.limit import Limit
from cluster.bench.machine import Machine
from cluster.bench.rivals.contest import RivalFigure, RivalState
from cluster.bench.statistics import Latency
from protocol.layout import KVLayout

VERSION = 2
MIB = 1 << 20


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures of one case.

    Attributes:
        blocks, nbytes: of one transfer.
        rounds: that count; in each all transfers of the case run at once.
        latency: of one transfer, from the first ship call to the last acknowledgement.
        gb_per_s: bytes of a round over its median time.
        limit: what it is held against.
        limit_gb_per_s: the limit's figure for the same bytes, from the same rounds.
        ratio: share of the limit's speed, the median over the rounds.
        rivals: the same work by others, in the same rounds.
    """

    blocks: int
    nbytes: int
    rounds: int
    latency: Latency
    gb_per_s: float
    limit: Limit
    limit_gb_per_s: float
    ratio: float
    rivals: tuple[RivalFigure, ...] = ()

    def ratio_to(self, rival: str) -> float | None:
        """Our speed over a rival's, where it took part."""
        return next((figure.ratio for figure in self.rivals if figure.rival == rival), None)


class Outcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What came of one case.

    Attributes:
        case: which.
        state: "failed" when it began and did not end well, "skipped" when its transport does not work here.
        measured: figures, of a measured case.
        reason: why there are none, of another.
    """

    case: Case
    state: Literal["measured", "failed", "skipped"]
    measured: Measured | None = None
    reason: str = ""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the run was made; names as the command's options."""

    seconds: float
    time_limit: float
    streams: int
    seed: int
    max_pool: int
    two_machines: bool


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run.

    Attributes:
        version: of this format.
        kvferry: version of the package.
        model: preset, or name of the directory.
        layout, block_bytes: of both pools.
        limits: how each limit was measured.
        rivals: the invited ones, as they took part in each transport's cases.
        complete: False when the run was cut short.
    """

    version: int = VERSION
    kvferry: str
    machine: Machine
    model: str
    layout: KVLayout
    block_bytes: int
    settings: Settings
    limits: dict[str, str]
    rivals: tuple[RivalState, ...] = ()
    outcomes: tuple[Outcome, ...]
    complete: bool


def summary(outcome: Outcome) -> str:
    """What came of a case, in a word or two."""
    return outcome.state if outcome.measured is None else f"{outcome.measured.gb_per_s:.2f} GB/s"


def outcome_table(report: Report) -> Table:
    """The measured cases, one a row."""
    table = Table(box=None, pad_edge=False)
    for heading in ("transport", "tokens", "blocks", "way", "at once", "MiB"):
        table.add_column(heading, justify="left" if heading in ("transport", "blocks", "way") else "right")
    for heading in ("p50 ms", "p90 ms", "p99 ms", "GB/s", "limit", "GB/s", "ratio", "rounds"):
        table.add_column(heading, justify="right", no_wrap=True)
    rivals = rivals_of(report)
    for rival in rivals:
        table.add_column(f"/{rival}", justify="right", no_wrap=True)
    for outcome in report.outcomes:
        case, found = outcome.case, outcome.measured
        if found is None:
            continue
        ratios = [found.ratio_to(rival) for rival in rivals]
        latency = (found.latency.p50, found.latency.p90, found.latency.p99)
        table.add_row(
            case.transport,
            str(case.tokens),
            case.table,
            case.way,
            str(case.concurrency),
            f"{found.nbytes / MIB:.2f}" if found.nbytes < 10 * MIB else f"{found.nbytes / MIB:.0f}",
            *(f"{1e3 * seconds:.3g}" if seconds < 1.0 else f"{1e3 * seconds:.0f}" for seconds in latency),
            f"{found.gb_per_s:.2f}",
            found.limit,
            f"{found.limit_gb_per_s:.2f}",
            f"{found.ratio:.2f}",
            str(found.rounds),
            *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        )
    return table


def rivals_of(report: Report) -> list[str]:
    """Rivals that some case has figures of."""
    figures = [figure for outcome in report.outcomes if outcome.measured for figure in outcome.measured.rivals]
    return list(dict.fromkeys(figure.rival for figure in figures))


def remarks(report: Report) -> list[str]:
    """What has to be known to read the table: the limits that stand in it, and the cases that do not."""
    used = {outcome.measured.limit for outcome in report.outcomes if outcome.measured is not None}
    lines = [f"limit {name}: {text}" for name, text in report.limits.items() if name in used]
    if used:
        lines.append("ratio: median over the rounds of limit time / transport time; percentiles by nearest rank")
    for state in dict.fromkeys(report.rivals):
        if state.reason:
            lines.append(f"vs {state.rival}: {state.reason}")
        else:
            lines.append(f"/{state.rival}: our speed over that of {state.rival} {state.version}, {state.settings}")
    reasons: dict[str, list[Outcome]] = {}
    for outcome in report.outcomes:
        if outcome.state == "skipped":
            reasons.setdefault(f"skipped {outcome.case.transport}: {outcome.reason}", []).append(outcome)
        elif outcome.state == "failed":
            lines.append(f"failed {outcome.case}: {outcome.reason}")
    lines.extend(reasons)
    if not report.complete:
        lines.append("cut short: not all cases were run")
    return lines
