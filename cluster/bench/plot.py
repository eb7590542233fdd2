"""The figures of a run as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster.bench.picture import check_plot, write_figure
from cluster.bench.report import Measured, Report, remarks, rivals_of

WIDTH_INCHES, HEIGHT_INCHES = 13.0, 5.0


def write_plot(report: Report, file: Path) -> None:
    """Draw the report; raises as :func:`cluster.bench.picture.check_plot`, and where the file cannot be written."""
    check_plot(file)
    write_figure(_figure(report), file, "kvferry bench transfer", report, remarks(report))


def series(report: Report) -> dict[str, list[Measured]]:
    """The measured cases by all that does not change the size of a transfer, each by growing size."""
    found: dict[str, list[Measured]] = {}
    for outcome in report.outcomes:
        if outcome.measured is not None:
            case = outcome.case
            name = f"{case.transport}, {case.table}, {case.way}, {case.concurrency} at once"
            found.setdefault(name, []).append(outcome.measured)
    return {name: sorted(points, key=lambda point: point.nbytes) for name, points in found.items()}


def _figure(report: Report) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    speed, delay = figure.subplots(1, 2)
    for name, points in series(report).items():
        sizes = [point.nbytes / (1 << 20) for point in points]
        (line,) = speed.plot(sizes, [point.gb_per_s for point in points], marker="o", label=name)
        limits = [point.limit_gb_per_s for point in points]
        speed.plot(sizes, limits, linestyle=":", color=line.get_color())
        for rival in rivals_of(report):
            _rival_line(speed, rival, points, line.get_color())
        middle = [1e3 * point.latency.p50 for point in points]
        slowest = [1e3 * point.latency.p99 for point in points]
        delay.plot(sizes, middle, marker="o", color=line.get_color())
        delay.fill_between(sizes, middle, slowest, alpha=0.15, color=line.get_color())
    speed.set(
        xscale="log", xlabel="MiB a transfer", ylabel="GB/s", title="throughput (dotted: the limit, dashed: rivals)"
    )
    delay.set(xscale="log", yscale="log", xlabel="MiB a transfer", ylabel="ms", title="latency (p50 to p99)")
    speed.set_ylim(bottom=0)
    if speed.lines:
        speed.legend(fontsize="small")
    figure.suptitle(f"kvferry {report.kvferry}, {report.model}, blocks of {report.block_bytes >> 10} KiB")
    return figure


def _rival_line(axes: Any, rival: str, points: list[Measured], color: str) -> None:
    met = [(point.nbytes / (1 << 20), figure) for point in points for figure in point.rivals if figure.rival == rival]
    if met:
        sizes, speeds = [size for size, _ in met], [figure.gb_per_s for _, figure in met]
        axes.plot(sizes, speeds, linestyle="--", marker="x", color=color, label=rival)
