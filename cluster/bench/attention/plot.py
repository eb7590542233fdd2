"""The figures of a run as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster.bench.attention.figures import AttentionReport, attention_remarks, headline
from cluster.bench.picture import check_plot, write_figure


def lines_of(report: AttentionReport) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Fraction of the roofline by context, for each kind of step and each backend with each number of sequences."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for outcome in report.outcomes:
        for figure in outcome.figures:
            if figure.state == "measured":
                name = (outcome.case.kind, f"{figure.entry}, {outcome.case.batch}")
                found.setdefault(name, []).append((outcome.case.context, figure.fraction))
    return {name: sorted(points) for name, points in found.items()}


def write_attention_plot(report: AttentionReport, file: Path) -> None:
    """Draw the report; raises as :func:`cluster.bench.picture.check_plot`, and where the file cannot be written."""
    check_plot(file)
    write_figure(_drawn(report), file, "kvferry bench attention", report, attention_remarks(report))


def _drawn(report: AttentionReport) -> Any:
    from matplotlib.figure import Figure

    found = lines_of(report)
    kinds = list(dict.fromkeys(kind for kind, _ in found)) or ["decode"]
    figure = Figure(figsize=(6.5 * len(kinds), 5.0), layout="constrained")
    for kind, axes in zip(kinds, figure.subplots(1, len(kinds), squeeze=False)[0], strict=True):
        for (own, name), points in found.items():
            if own == kind:
                axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.axhline(1.0, linestyle=":", color="gray")
        axes.set(xscale="log", xlabel="tokens of context", ylabel="of the roofline", title=kind)
        axes.set_ylim(bottom=0)
        if found:
            axes.legend(fontsize="small")
    figure.suptitle(headline(report), fontsize="small")
    return figure
