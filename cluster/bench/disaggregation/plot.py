"""The figures of a run as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster.bench.disaggregation.figures import APART, TOGETHER, DisaggregationReport, LoadRow
from cluster.bench.picture import check_plot, write_figure


def write_disaggregation_plot(report: DisaggregationReport, file: Path) -> None:
    """Draw the report; raises as :func:`cluster.bench.picture.check_plot`, and where the file cannot be written."""
    check_plot(file)
    notes = ("one curve for each way: of a hundred gaps between two tokens, so many are shorter than that",)
    write_figure(_drawn(report), file, "kvferry bench disaggregation", report, notes)


def name_of(row: LoadRow) -> str:
    """What a curve is called."""
    return f"{row.way}, {row.step_tokens} tokens a step" if row.step_tokens else row.way


def _drawn(report: DisaggregationReport) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 5.0), layout="constrained")
    alone, load = figure.subplots(1, 2)
    lengths = [row.prompt_tokens for row in report.alone]
    alone.plot(lengths, [1e3 * row.apart.ttft for row in report.alone], marker="o", label=f"TTFT, {APART}")
    alone.plot(lengths, [1e3 * row.together.ttft for row in report.alone], marker="x", label=f"TTFT, {TOGETHER}")
    alone.set(xlabel="tokens of prompt", ylabel="ms", title="one request at a time")
    alone.set_ylim(bottom=0)
    for row in report.load:
        shares = [100 * place / len(row.sample) for place in range(len(row.sample))]
        load.plot([1e3 * seconds for seconds in row.sample], shares, label=name_of(row))
    title = f"{report.streams} streams, {report.long_tokens} more tokens of prompt every {report.interval:g} s"
    load.set(xscale="log", xlabel="ms between two tokens", ylabel="of a hundred", title=title)
    for axes in (alone, load):
        if axes.lines:
            axes.legend(fontsize="small")
    figure.suptitle(f"{report.model} on two cores of {report.machine.processor}", fontsize="small")
    return figure
