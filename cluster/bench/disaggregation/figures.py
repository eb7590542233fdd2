"""What was measured, and how it reads. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.table import Table

from cluster.bench.machine import Machine
from cluster.bench.statistics import Latency

APART, TOGETHER = "1P1D", "together"


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request alone on the machine; seconds.

    Attributes:
        ttft: from the call to the first token.
        prefill, handoff: of it, as the workers told; there is no handoff where one worker does both.
        second: from the first token to the second: the handoff is in it.
        tpot: per token after the second.
        kv_bytes: that crossed.
    """

    ttft: float
    prefill: float
    handoff: float
    second: float
    tpot: float
    kv_bytes: int


class AloneRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Medians of one prompt length, the same decode worker with and without a prefill worker in front.

    Attributes:
        prompt_tokens: of each request.
        apart, together: medians of either way.
        ttft_ratio, tpot_ratio: median over the turns of apart to together.
    """

    prompt_tokens: int
    apart: Request
    together: Request
    ttft_ratio: float
    tpot_ratio: float


class LoadRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Streams that decode while long prompts arrive.

    Attributes:
        way: ``1P1D``, or ``together`` with its budget of tokens per step.
        step_tokens: that budget; 0 where prefill and decode are apart.
        gaps: between two tokens of a stream, all streams together.
        quiet: the same before the first long prompt.
        worst: the longest of them.
        long_ttft: of the long prompts; None where none was answered in time.
        tokens_per_second: of all streams.
        step_gap: mean seconds that the decoding engine stood still between two steps.
        sample: every so manieth gap in order of length, for the picture.
    """

    way: str
    step_tokens: int
    gaps: Latency
    quiet: Latency
    worst: float
    long_ttft: Latency | None
    tokens_per_second: float
    step_gap: float
    sample: tuple[float, ...]


class DisaggregationReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a run.

    Attributes:
        model: its name.
        machine: where.
        cores: that the workers shared.
        runs: of each prompt length.
        streams, long_tokens, interval, seconds: of the mixed load.
        alone, load: the figures.
    """

    model: str
    machine: Machine
    cores: tuple[int, ...]
    runs: int
    streams: int
    long_tokens: int
    interval: float
    seconds: float
    alone: tuple[AloneRow, ...]
    load: tuple[LoadRow, ...]


def p99_ratio(report: DisaggregationReport) -> float | None:
    """Slowest hundredth of the gaps between tokens: 1P1D to the best of the engines that do both."""
    apart = [row.gaps.p99 for row in report.load if row.way == APART]
    together = [row.gaps.p99 for row in report.load if row.way == TOGETHER]
    return apart[0] / min(together) if apart and together else None


def alone_table(rows: Sequence[AloneRow]) -> Table:
    """Requests alone, for a person."""
    table = Table(title="one request at a time, medians, ms", box=None)
    heads = (
        "prompt",
        "way",
        "TTFT",
        "of it prefill",
        "handoff",
        "2nd token",
        "TPOT",
        "KV MiB",
        "TTFT ratio",
        "TPOT ratio",
    )
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        for way, each in ((APART, row.apart), (TOGETHER, row.together)):
            times = (each.ttft, each.prefill, each.handoff, each.second, each.tpot)
            ratios = (f"{row.ttft_ratio:.3f}", f"{row.tpot_ratio:.3f}") if way == APART else ("", "")
            shown = (f"{1e3 * seconds:.2f}" for seconds in times)
            table.add_row(str(row.prompt_tokens), way, *shown, f"{each.kv_bytes / (1 << 20):.1f}", *ratios)
    return table


def load_table(report: DisaggregationReport) -> Table:
    """Mixed load, for a person."""
    title = (
        f"{report.streams} streams, a prompt of {report.long_tokens} tokens every {report.interval:g} s, "
        f"{report.seconds:g} s: ms between two tokens of a stream"
    )
    table = Table(title=title, box=None)
    for head in (
        "way",
        "step tokens",
        "quiet p50",
        "p50",
        "p90",
        "p99",
        "worst",
        "long TTFT p50",
        "tokens/s",
        "step gap",
    ):
        table.add_column(head, justify="right", no_wrap=True)
    for row in report.load:
        times = (row.quiet.p50, row.gaps.p50, row.gaps.p90, row.gaps.p99, row.worst)
        long = "-" if row.long_ttft is None else f"{1e3 * row.long_ttft.p50:.0f}"
        shown = (f"{1e3 * seconds:.1f}" for seconds in times)
        table.add_row(
            row.way,
            str(row.step_tokens or "-"),
            *shown,
            long,
            f"{row.tokens_per_second:.0f}",
            f"{1e3 * row.step_gap:.2f}",
        )
    return table
