"""Where the figures of a benchmark go: a table on standard output, and the files that it was told of."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from protocol.errors import ConfigError

TABLE_WIDTH = 160
"""Where standard output is no terminal."""


def standard_output() -> Console:
    """Standard output, as wide as its terminal or as a table needs."""
    out = Console()
    return out if out.is_terminal else Console(width=TABLE_WIDTH)


def tell(console: Console, headline: str, table: Table, remarks: Iterable[str]) -> None:
    """Print what was measured, the figures, and what is to be known of them."""
    console.print(headline, highlight=False)
    console.print(table)
    for line in remarks:
        console.print(f"* {line}", markup=False, highlight=False)


def check_folder(file: Path | None, *, field: str) -> None:
    """See that ``file`` can be written when all is measured.

    Raises:
        ConfigError: there is no such folder.
    """
    if file is not None and not file.absolute().parent.is_dir():
        raise ConfigError(f"{field}: there is no folder {file.absolute().parent}", field=field)


def write_bytes(file: Path, content: bytes, *, field: str) -> None:
    """Write a file that an option named.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        file.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{field}: cannot write {file}: {error}", field=field) from error


def write_json(figures: object, file: Path) -> None:
    """Write what was measured; raises as :func:`write_bytes`."""
    write_bytes(file, msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n", field="json")
