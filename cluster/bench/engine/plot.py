"""The figures of a run as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster.bench.engine.figures import EngineReport, engine_remarks, headline
from cluster.bench.picture import check_plot, write_figure

FLOOR = "floor"


def lines_of(report: EngineReport) -> dict[tuple[str, str, int], list[tuple[int, float]]]:
    """Tokens a second by context, for each kind of step, each engine and number of sequences, and for the floor."""
    found: dict[tuple[str, str, int], list[tuple[int, float]]] = {}
    for outcome in report.outcomes:
        case = outcome.case
        for figure in outcome.figures:
            found.setdefault((case.kind, figure.engine, case.batch), []).append((case.context, figure.tokens_per_s))
        for figure in outcome.figures[:1]:
            limit = figure.tokens_per_s * figure.seconds / outcome.floor_seconds
            found.setdefault((case.kind, FLOOR, case.batch), []).append((case.context, limit))
    return {name: sorted(points) for name, points in found.items()}


def write_engine_plot(report: EngineReport, file: Path) -> None:
    """Draw the report; raises as :func:`cluster.bench.picture.check_plot`, and where the file cannot be written."""
    check_plot(file)
    write_figure(_drawn(report), file, "kvferry bench engine", report, engine_remarks(report))


def _drawn(report: EngineReport) -> Any:
    from matplotlib.figure import Figure

    found = lines_of(report)
    kinds = list(dict.fromkeys(kind for kind, _, _ in found)) or ["decode"]
    batches = sorted({batch for _, _, batch in found})
    engines = list(dict.fromkeys(engine for _, engine, _ in found if engine != FLOOR))
    figure = Figure(figsize=(6.5 * len(kinds), 5.0), layout="constrained")
    for kind, axes in zip(kinds, figure.subplots(1, len(kinds), squeeze=False)[0], strict=True):
        for (own, engine, batch), points in found.items():
            if own != kind:
                continue
            style: dict[str, Any] = {"color": f"C{batches.index(batch)}"}
            if engine == FLOOR:
                style |= {"linestyle": ":"}
            else:
                style |= {"marker": "oxs^v"[engines.index(engine) % 5], "label": f"{engine}, {batch}"}
            axes.plot(*zip(*points, strict=True), **style)
        axes.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="tokens/s", title=kind)
        if found:
            axes.legend(fontsize="small")
    figure.suptitle(f"{headline(report)} (dotted: the roofline)", fontsize="small")
    return figure
