"""``kvferry model``: fetch, list, find and check the models that are known by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from cluster.model_source import Progress
from cluster.model_store import KNOWN_MODELS, get_model, model_directory, model_is_ready, verify_model

model_app = typer.Typer(
    name="model", help="Get, list, path and verify: the models that have a name.", no_args_is_help=True
)

STAGES = {
    "wait": "waiting for another process that fetches the model",
    "download": "downloading",
    "unpack": "unpacking",
    "convert": "converting",
}
"""What a person reads for each stage of :class:`cluster.model_source.Progress`."""

Name = Annotated[str, typer.Argument(metavar="NAME", help=f"One of: {', '.join(KNOWN_MODELS)}.")]


@contextmanager
def show_progress(console: Console, title: str) -> Iterator[Progress]:
    """A bar per stage on a terminal, one line per stage elsewhere; nothing at all if nothing is reported."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with ProgressBar(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks = {stage: bars.add_task(f"{title}: {text}", start=False, visible=False) for stage, text in STAGES.items()}
        started: set[str] = set()

        def report(stage: str, done: int, total: int) -> None:
            if stage not in started:
                started.add(stage)
                bars.start_task(tasks[stage])
                if not console.is_terminal:
                    console.print(f"{title}: {STAGES[stage]}", highlight=False)
            bars.update(tasks[stage], completed=done, total=total or None, visible=True)

        yield report


@model_app.command("get")
def get_command(name: Name) -> None:
    """Fetch a model and convert it, unless it is there already; print its directory."""
    with show_progress(Console(stderr=True), name) as progress:
        directory = get_model(name, progress)
    typer.echo(directory)


@model_app.command("list")
def list_command() -> None:
    """List the models known by name, and whether each is in the cache."""
    table = Table("name", "model", "licence", "in the cache", box=None, pad_edge=False)
    for name, model in KNOWN_MODELS.items():
        table.add_row(name, model.title, model.licence, "yes" if model_is_ready(name) else "no")
    Console().print(table)


@model_app.command("path")
def path_command(name: Name) -> None:
    """Print where a model lies, or will lie, in the cache; fetches nothing."""
    typer.echo(model_directory(name))


@model_app.command("verify")
def verify_command(name: Name) -> None:
    """Read every byte of a model in the cache and compare digests."""
    typer.echo(f"{verify_model(name)}: all digests match")
