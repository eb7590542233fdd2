"""The figures of a simulation as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster.bench.picture import check_plot, write_figure
from cluster.simulation.figures import CURVE, SimulationReport, remarks

WIDTH_INCHES, HEIGHT_INCHES = 15.0, 5.0


def write_plot(report: SimulationReport, file: Path) -> None:
    """Draw the report; raises as :func:`cluster.bench.picture.check_plot`, and where the file cannot be written."""
    check_plot(file)
    write_figure(_figure(report), file, "kvferry simulate", report, remarks(report))


def _figure(report: SimulationReport) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    first, further, good = figure.subplots(1, 3)
    several = len(report.rates) > 1
    names = [f"{each.policy}, {each.rate:.4g}/s" if several else each.policy for each in report.figures]
    for each, name in zip(report.figures, names, strict=True):
        for axes, spread in ((first, each.ttft), (further, each.tpot)):
            if spread.curve:
                axes.plot([1e3 * value for value in spread.curve], CURVE, label=name)
    for axes, title in ((first, "time to the first token"), (further, "time per output token")):
        axes.set(xscale="log", xlabel="ms", ylabel="% of requests", title=title)
        axes.legend(fontsize="small")
    good.barh(names, [100 * each.good for each in report.figures])
    good.set(xlabel="% of requests", title=f"within {report.ttft:g} s and {report.tpot:g} s a token", xlim=(0, 100))
    figure.suptitle(f"{report.trace}, {report.workers}, {report.profile}")
    return figure
