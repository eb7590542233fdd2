"""What a run found, as values: written as JSON, printed as a table."""

from __future__ import annotations

from typing import Literal

import msgspec
from rich.table import Table

from cluster.bench.attention.case import AttentionCase
from cluster.bench.attention.shape import HeadShape
from cluster.bench.machine import Machine
from cluster.bench.roofline import Bound

VERSION = 1


class EntryFigure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One backend in one case.

    Attributes:
        entry: its name.
        state: "wrong" where its result is not the reference's, within the dtype's rounding; "skipped" with a reason.
        seconds: of one layer, the median over the rounds, with a cold cache.
        plan_seconds: what comes on top once per step, whatever the number of layers.
        fraction: of the roofline, the median over the rounds.
        error: largest difference of the first and last query of each sequence to float64.
        reason: why it was skipped.
    """

    entry: str
    state: Literal["measured", "wrong", "skipped"]
    seconds: float = 0.0
    plan_seconds: float = 0.0
    fraction: float = 0.0
    error: float = 0.0
    reason: str = ""


class AttentionOutcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What came of one case.

    Attributes:
        case: which.
        layers: that a round goes through.
        rounds: that count.
        nbytes, flops: of one layer, at least.
        floor_seconds, bound: of one layer by the roofline, and what sets it; medians over the rounds.
        figures: by entry.
    """

    case: AttentionCase
    layers: int
    rounds: int
    nbytes: int
    flops: int
    floor_seconds: float
    bound: Bound
    figures: tuple[EntryFigure, ...]


class AttentionReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run.

    Attributes:
        version: of this format.
        kvferry: version of the package.
        machine, device: where it ran.
        model, shape: whose heads.
        dtype, order, block_size, window, softcap, threads: as the command's options.
        read_gb_per_s, multiply_tflop_per_s: of the device, medians over all rounds.
        outcomes: the cases.
        complete: False when the run was cut short.
    """

    version: int = VERSION
    kvferry: str
    machine: Machine
    device: str
    model: str
    shape: HeadShape
    dtype: str
    order: str
    block_size: int
    window: int
    softcap: float
    threads: int
    read_gb_per_s: float
    multiply_tflop_per_s: float
    outcomes: tuple[AttentionOutcome, ...]
    complete: bool


def attention_table(report: AttentionReport) -> Table:
    """A row for each backend of each case."""
    table = Table(box=None, pad_edge=False)
    for heading in ("step", "sequences", "tokens", "context", "floor ms", "bound", "backend"):
        table.add_column(heading, justify="left" if heading in ("step", "bound", "backend") else "right", no_wrap=True)
    for heading in ("ms a layer", "of the floor", "plan ms", "error", "rounds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for outcome in report.outcomes:
        case = outcome.case
        for figure in outcome.figures:
            if figure.state == "skipped":
                continue
            table.add_row(
                case.kind,
                *(str(value) for value in (case.batch, case.queries, case.context)),
                f"{1e3 * outcome.floor_seconds:.3g}",
                outcome.bound,
                figure.entry,
                f"{1e3 * figure.seconds:.3g}",
                f"{figure.fraction:.2f}",
                f"{1e3 * figure.plan_seconds:.3g}",
                f"{figure.error:.1e}{' wrong' if figure.state == 'wrong' else ''}",
                str(outcome.rounds),
            )
    return table


def headline(report: AttentionReport) -> str:
    """What the table shows."""
    shape = report.shape
    return (
        f"{report.model}: {shape.heads} heads over {shape.kv_heads} of {shape.head_dim}, {report.dtype}, blocks of "
        f"{report.block_size} tokens, {report.order}; {report.device}, {report.threads} threads: reads "
        f"{report.read_gb_per_s:.1f} GB/s, multiplies {report.multiply_tflop_per_s:.3g} TFLOP/s"
    )


def attention_remarks(report: AttentionReport) -> list[str]:
    """What has to be known to read the table, and who does not stand in it."""
    lines = [
        "floor: the slower of a layer's bytes at the speed of one long read, and its products at that of one large "
        "product, both of the same round; medians, with a cold cache",
        "plan: what a step pays once, whatever its layers; error: largest difference to float64",
    ]
    for outcome in report.outcomes:
        lines += [f"skipped {found.entry}: {found.reason}" for found in outcome.figures if found.state == "skipped"]
    if not report.complete:
        lines.append("cut short: not all cases were run")
    return list(dict.fromkeys(lines))
