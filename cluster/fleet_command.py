"""``kvferry scale | drain | role | restart | logs``: what is done to a cluster that is up. Imports happen inside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    from cluster.operations import scale

    _do(cluster, timeout, lambda name, how: scale(name, counts(wanted), **how))


def drain_command(
    worker: Worker,
    cluster: Cluster = None,
    limit: Limit = None,
    timeout: Patience = 600.0,
) -> None:
    """Take a worker out: it gets no new work, finishes what it has, waits for who reads its KV, and is gone."""
    from cluster.operations import drain

    _do(cluster, timeout, lambda name, how: drain(name, worker, drain_timeout=limit, **how))


def role_command(
    worker: Worker,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="prefill or decode.")],
    cluster: Cluster = None,
    limit: Limit = None,
    timeout: Patience = 600.0,
) -> None:
    """Let a worker take the other role: it drains, and goes on in the same process, its weights still loaded."""
    from cluster.operations import change_role

    _do(cluster, timeout, lambda name, how: change_role(name, worker, role, drain_timeout=limit, **how))


def restart_command(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="The new processes' YAML file.")] = None,
    cluster: Cluster = None,
    timeout: Patience = 1800.0,
) -> None:
    """Replace every process, one by one, while the others serve; with FILE by such as are configured by it."""
    from cluster.config_file import load_config
    from cluster.model_store import resolve_model
    from cluster.plan import check_orders, planned_orders
    from cluster.renewal import restart

    config = None if file is None else load_config(file)
    if config is not None:
        check_orders(planned_orders(config), resolve_model(config.model))
    named = cluster if cluster or config is None else config.name
    _do(named, timeout, lambda name, how: restart(name, config, **how))


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


def _do(cluster: str | None, timeout: float, operation: Callable[[str, Any], SupervisorReport]) -> None:
    """Have an operation done to a cluster, or to the only one, telling of its steps and of what there is then.

    Args:
        cluster: its name.
        timeout: seconds to wait.
        operation: is given the name, and what each of them takes besides.
    """
    from cluster.display import StepPrinter
    from cluster.state import StateStore

    store = StateStore()
    name = cluster or store.only()
    how = {"progress": StepPrinter(Console(stderr=True)), "timeout": timeout, "store": store}
    wanted = operation(name, how).wanted
    typer.echo(f"cluster {name!r}: {wanted['prefill']} prefill, {wanted['decode']} decode workers")
