"""A figure of matplotlib's as a file: an image, or a page that holds the picture and its data."""

from __future__ import annotations

import html
import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from cluster.bench.output import check_folder, write_bytes
from protocol.errors import ConfigError

SUFFIXES = (".html", ".png", ".svg")


def check_plot(file: Path) -> None:
    """Say before a run, not after it, what would keep its plot from being written.

    Raises:
        ConfigError: the name ends in none of :data:`SUFFIXES`, or matplotlib is not installed (names the extra).
    """
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"plot must end in {', '.join(SUFFIXES)}, got {str(file)!r}", field="plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: install kvferry with the extra 'plot'", field="plot")


def check_files(json: Path | None, plot: Path | None) -> None:
    """Say before a run what would keep its figures or its plot from being written.

    Raises:
        ConfigError: there is no such folder, or as :func:`check_plot`.
    """
    check_folder(json, field="json")
    check_folder(plot, field="plot")
    if plot is not None:
        check_plot(plot)


def write_figure(figure: Any, file: Path, title: str, report: msgspec.Struct, notes: Sequence[str]) -> None:
    """Write ``figure``.

    Args:
        figure: of matplotlib's.
        file: its suffix says as what.
        title: of the page.
        report: the data, for the page.
        notes: what has to be known to read it.

    Raises:
        ConfigError: the file cannot be written.
    """
    picture = io.BytesIO()
    figure.savefig(picture, format="png" if file.suffix == ".png" else "svg", bbox_inches="tight")
    body = picture.getvalue()
    if file.suffix == ".html":
        body = _page(title, body.decode(), report, notes).encode()
    write_bytes(file, body, field="plot")


def _page(title: str, picture: str, report: msgspec.Struct, notes: Sequence[str]) -> str:
    data = msgspec.json.format(msgspec.json.encode(report), indent=1).decode()
    listed = "".join(f"<li>{html.escape(line)}</li>" for line in notes)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
        f"<body style='font-family:sans-serif'>{picture[picture.index('<svg') :]}<ul>{listed}</ul>"
        f"<details><summary>data</summary><pre>{html.escape(data)}</pre></details></body></html>\n"
    )
