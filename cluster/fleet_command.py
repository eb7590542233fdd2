"""``kvferry scale | drain | role | restart | logs``: what is done to a cluster that is up. Imports happen inside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from protocol.errors import ConfigError

if TYPE_CHECKING:
    from cluster.supervisor import SupervisorReport

Cluster = Annotated[
    str | None, typer.Option("--cluster", metavar="NAME", help="Which one; may be left out if only one is up.")
]
Patience = Annotated[float, typer.Option("--timeout", min=0.0, help="Seconds to wait until it is done.")]
Worker = Annotated[str, typer.Argument(metavar="WORKER", help="As kvferry status names it.")]
Limit = Annotated[
    float | None,
    typer.Option("--limit", min=0.0, help="Seconds after which it hands back what it has; default: the file's."),
]


def scale_command(
    wanted: Annotated[list[str], typer.Argument(metavar="ROLE=N...", help="As in: prefill=4 decode=2")],
    cluster: Cluster = None,
    timeout: Patience = 600.0,
) -> None:
    """Have so many workers of a role: further ones are started, and those too many finish what they have and leave."""
    from cluster.display import StepPrinter
    from cluster.operations import scale
    from cluster.state import StateStore

    store = StateStore()
    printer, name = StepPrinter(Console(stderr=True)), cluster or store.only()
    _show(name, scale(name, counts(wanted), printer, timeout=timeout, store=store))


def drain_command(
    worker: Worker,
    cluster: Cluster = None,
    limit: Limit = None,
    timeout: Patience = 600.0,
) -> None:
    """Take a worker out: it gets no new work, finishes what it has, waits for who reads its KV, and is gone."""
    from cluster.display import StepPrinter
    from cluster.operations import drain
    from cluster.state import StateStore

    store = StateStore()
    printer, name = StepPrinter(Console(stderr=True)), cluster or store.only()
    _show(name, drain(name, worker, printer, drain_timeout=limit, timeout=timeout, store=store))


def role_command(
    worker: Worker,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="prefill or decode.")],
    cluster: Cluster = None,
    limit: Limit = None,
    timeout: Patience = 600.0,
) -> None:
    """Let a worker take the other role: it drains, and goes on in the same process, its weights still loaded."""
    from cluster.display import StepPrinter
    from cluster.operations import change_role
    from cluster.state import StateStore

    store = StateStore()
    printer, name = StepPrinter(Console(stderr=True)), cluster or store.only()
    _show(name, change_role(name, worker, role, printer, drain_timeout=limit, timeout=timeout, store=store))


def restart_command(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="The new workers' YAML file.")] = None,
    cluster: Cluster = None,
    timeout: Patience = 1800.0,
) -> None:
    """Replace every worker, one by one, while the others serve; with FILE by workers that are configured by it."""
    from cluster.config_file import load_config
    from cluster.display import StepPrinter
    from cluster.model_store import resolve_model
    from cluster.operations import restart
    from cluster.plan import check_orders, planned_orders
    from cluster.state import StateStore

    store = StateStore()
    config = None if file is None else load_config(file)
    if config is not None:
        check_orders(planned_orders(config), resolve_model(config.model))
    name = cluster or (store.only() if config is None else config.name)
    _show(name, restart(name, config, StepPrinter(Console(stderr=True)), timeout=timeout, store=store))


def logs_command(
    process: Annotated[str, typer.Argument(metavar="PROCESS", help="As kvferry status names it, or supervisor.")],
    cluster: Cluster = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=100000, help="How many.")] = 100,
) -> None:
    """Print the last lines that a process of the cluster has logged, wherever it runs."""
    from cluster.operations import log
    from cluster.standard_output import kept_for_the_answer
    from cluster.state import StateStore

    store = StateStore()
    with kept_for_the_answer():
        text = log(cluster or store.only(), process, lines, store=store)
    typer.echo(text)


def counts(words: list[str]) -> dict[str, int]:
    """``prefill=4 decode=2`` as a mapping.

    Raises:
        ConfigError: a word is not of that form, or names a role twice.
    """
    found: dict[str, int] = {}
    for word in words:
        role, equals, number = word.partition("=")
        if not equals or not number.isdecimal() or len(number) > 9:
            raise ConfigError(f"ROLE=N expected, as in prefill=4, got {word!r}", field="scale")
        if role in found:
            raise ConfigError(f"{role} stands twice", field="scale")
        found[role] = int(number)
    return found


def _show(cluster: str, report: SupervisorReport) -> None:
    typer.echo(f"cluster {cluster!r}: {report.wanted['prefill']} prefill, {report.wanted['decode']} decode workers")
