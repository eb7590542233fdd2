"""The figures of a load test as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from cluster.bench.picture import check_plot, write_figure
from cluster.bench.serve.answer import Record
from cluster.bench.serve.figures import ServeReport
from cluster.bench.serve.report import headline, remarks

WIDTH_INCHES, HEIGHT_INCHES = 13.0, 8.0


def write_serve_plot(report: ServeReport, file: Path) -> None:
    """Draw the report; raises as :func:`cluster.bench.picture.check_plot`, and where the file cannot be written."""
    check_plot(file)
    # The page is to be read: what became of each request is in the picture, and in the file of --json.
    data = msgspec.structs.replace(report, records=())
    write_figure(_drawn(report), file, "kvferry bench serve", data, [headline(report), *remarks(report)])


def curve(records: tuple[Record, ...], name: str) -> tuple[list[float], list[float]]:
    """Milliseconds of what was completed in order, and of a hundred requests how many took no longer."""
    values = sorted(
        1e3 * value for record in records if record.error is None and (value := getattr(record, name)) is not None
    )
    return values, [100.0 * (place + 1) / len(values) for place in range(len(values))]


def _drawn(report: ServeReport) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    panels = figure.subplots(2, 2)
    titles = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "whole answer"}
    for axes, (name, title) in zip(panels.flat, titles.items(), strict=False):
        for place, records in enumerate(report.records):
            values, shares = curve(records, name)
            axes.plot(values, shares, label=_label(report, place))
        bound = None if report.target is None else getattr(report.target, name)
        if bound is not None:
            axes.axvline(1e3 * bound, linestyle=":", color="black", label="target")
        axes.set(xlabel="ms", ylabel="of a hundred", title=title)
        axes.legend(fontsize="small")
    course = panels.flat[3]
    for place, records in enumerate(report.records):
        shown = [record for record in records if record.error is None and record.ttft is not None]
        course.scatter(
            [record.due for record in shown],
            [1e3 * record.ttft for record in shown if record.ttft is not None],
            s=6,
            label=_label(report, place),
        )
        failed = [record.due for record in records if record.error is not None]
        course.scatter(failed, [0.0 for _ in failed], s=12, marker="x", label=f"failed: {len(failed)}")
    course.set(xlabel="seconds into the run", ylabel="TTFT, ms", title="request by request")
    course.legend(fontsize="small")
    figure.suptitle(headline(report), fontsize="small")
    return figure


def _label(report: ServeReport, place: int) -> str:
    return f"{place + 1}: {report.servers[place].url}"
