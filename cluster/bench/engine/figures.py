"""What a run found, as values: written as JSON, printed as a table."""

from __future__ import annotations

from typing import Literal

import msgspec
from rich.table import Table

from cluster.bench.engine.case import EngineCase
from cluster.bench.machine import Machine
from cluster.bench.rivals.contest import RivalState
from cluster.bench.roofline import Bound

VERSION = 1
OURS = "kvferry"


class EngineFigure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine in one case; medians over the rounds.

    Attributes:
        engine: its name.
        seconds: of one step of a decode, the mean of a round's; of a whole prefill.
        tokens_per_s: drawn by a decode, computed by a prefill.
        fraction: of the roofline.
        ratio: our speed over its own, from the same rounds; 1 for ours.
    """

    engine: str
    seconds: float
    tokens_per_s: float
    fraction: float
    ratio: float


class EngineOutcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What came of one case.

    Attributes:
        case: which.
        rounds: that count.
        nbytes, flops: of one step of a decode, or of a whole prefill, at least.
        floor_seconds, bound: of the same by the roofline, and what sets it; medians over the rounds.
        figures: ours first; none where it was skipped.
        reason: why it was skipped.
    """

    case: EngineCase
    rounds: int = 0
    nbytes: int = 0
    flops: int = 0
    floor_seconds: float = 0.0
    bound: Bound = "memory"
    figures: tuple[EngineFigure, ...] = ()
    reason: str = ""


class EngineReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run.

    Attributes:
        version: of this format.
        kvferry: version of the package.
        machine, device: where it ran.
        model: name of the directory.
        dtype, cache_dtype, attention, threads, block_size, chunk, steps, seed, cpu_time: as the command's options.
        read_gb_per_s, multiply_tflop_per_s: of the device, medians over all rounds.
        rivals: the invited ones, as they took part.
        outcomes: the cases.
        complete: False when the run was cut short.
    """

    version: int = VERSION
    kvferry: str
    machine: Machine
    device: str
    model: str
    dtype: str
    cache_dtype: str
    attention: str
    threads: int
    block_size: int
    chunk: int
    steps: int
    seed: int
    cpu_time: bool
    read_gb_per_s: float
    multiply_tflop_per_s: float
    rivals: tuple[RivalState, ...]
    outcomes: tuple[EngineOutcome, ...]
    complete: bool


def summary(outcome: EngineOutcome) -> str | None:
    """What came of a case, in a few words; None of one that was skipped."""
    return ", ".join(f"{found.engine} {1e3 * found.seconds:.4g} ms" for found in outcome.figures) or None


def engine_table(report: EngineReport) -> Table:
    """A row for each engine of each case."""
    table = Table(box=None, pad_edge=False)
    words: dict[str, Literal["left"]] = dict.fromkeys(("step", "bound", "engine"), "left")
    for heading in ("step", "sequences", "context", "floor ms", "bound", "engine", "ms", "tokens/s", "of the floor"):
        table.add_column(heading, justify=words.get(heading, "right"), no_wrap=True)
    for heading in ("ours", "rounds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for outcome in report.outcomes:
        case = outcome.case
        for figure in outcome.figures:
            table.add_row(
                *(case.kind, str(case.batch), str(case.context)),
                *(f"{1e3 * outcome.floor_seconds:.3g}", outcome.bound),
                *(figure.engine, f"{1e3 * figure.seconds:.4g}", f"{figure.tokens_per_s:.4g}"),
                *(f"{figure.fraction:.2f}", "" if figure.engine == OURS else f"{figure.ratio:.2f}"),
                str(outcome.rounds),
            )
    return table


def headline(report: EngineReport) -> str:
    """What the table shows."""
    cached = "" if report.cache_dtype == report.dtype else f", cache in {report.cache_dtype}"
    clock = ", CPU time" if report.cpu_time else ""
    return (
        f"{report.model}: {report.dtype}{cached}, attention {report.attention}, chunks of {report.chunk} tokens; "
        f"{report.device}, {report.threads} threads{clock}: reads {report.read_gb_per_s:.1f} GB/s, multiplies "
        f"{report.multiply_tflop_per_s:.3g} TFLOP/s"
    )


def engine_remarks(report: EngineReport) -> list[str]:
    """What has to be known to read the table, and who does not stand in it."""
    lines = [
        "ms: of one step of a decode, or from prompts to first tokens; floor: the slower of its bytes at the speed of "
        "one long read, and its products at that of one large product, both of the same round; all medians",
    ]
    for state in dict.fromkeys(report.rivals):
        if state.reason:
            lines.append(f"vs {state.rival}: {state.reason}")
        else:
            lines.append(f"ours: our speed over that of {state.rival} {state.version} ({state.settings})")
    reasons: dict[str, list[str]] = {}
    for outcome in report.outcomes:
        if outcome.reason:
            reasons.setdefault(outcome.reason, []).append(str(outcome.case))
    lines += [f"skipped {'; '.join(cases)}: {reason}" for reason, cases in reasons.items()]
    if not report.complete:
        lines.append("cut short: not all cases were run")
    return lines
