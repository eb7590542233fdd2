"""``kvferry autoscale``: how workers come and go by load, and what would be done. Heavy imports happen inside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.fleet_command import Cluster

if TYPE_CHECKING:
    from cluster.autoscale.planner import Plan
    from cluster.autoscale.report import AutoscaleReport


def autoscale_command(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A cluster's YAML file; its 'scale' section is taken over.")
    ] = None,
    cluster: Cluster = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Watch, and print what would be done and why; nothing is done.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0.0, help="To watch, with --dry-run.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; of a dry run a line for each decision.")] = False,
) -> None:
    """Show what the autoscaler sees and has done; with FILE, have workers come and go by its 'scale' section."""
    import msgspec

    from cluster.config_file import load_config
    from cluster.operations import operator
    from cluster.state import StateStore

    store = StateStore()
    given = None if file is None else load_config(file)
    name = cluster or (store.only() if given is None else given.name)
    with operator(name, store) as (asked, _, ray):
        if dry_run:
            from cluster.autoscale.rehearsal import rehearse

            config = asked.ask("config").config
            assert config is not None, "the answer to this question has one"
            if given is not None:
                config = msgspec.structs.replace(config, scale=given.scale)
            rehearse(asked, ray, config, seconds, lambda plan: _tell(plan, as_json=as_json))
            return
        if given is not None:
            asked.ask("rescale", msgspec.json.encode(given.scale))
        report = asked.ask("autoscale").autoscale
        assert report is not None, "the answer to this question has one"
    _show(name, report, as_json=as_json)


def _show(cluster: str, report: AutoscaleReport, *, as_json: bool) -> None:
    from cluster.autoscale.report import change_lines, roles_table
    from cluster.bench.output import standard_output
    from cluster.display import print_json

    if as_json:
        print_json(report)
        return
    auto = report.auto
    word = "by load" if auto.enabled else "by command only (scale: {auto: {enabled: true}} lets them come by load)"
    typer.echo(
        f"cluster {cluster!r}: workers come and go {word}; first token within {auto.ttft:g} s and {auto.tpot:g} s per "
        f"further token for {auto.percentile:.0%}"
    )
    if report.roles:
        standard_output().print(roles_table(report.roles))
    for line in (*change_lines(report.changes), report.held, report.error and f"the router: {report.error}"):
        if line:
            typer.echo(line)


def _tell(plan: Plan, *, as_json: bool) -> None:
    import msgspec

    from cluster.autoscale.report import Change, change_lines, roles_of, roles_table, spelled
    from cluster.bench.output import standard_output

    changes = [Change(what=spelled(action), why=action.why) for action in plan.actions]
    if as_json:
        # A line for each decision, as it is made.
        typer.echo(msgspec.json.encode({"roles": roles_of(plan), "changes": changes, "held": plan.held}).decode())
        return
    standard_output().print(roles_table(roles_of(plan)))
    for line in (*change_lines(changes), plan.held):
        if line:
            typer.echo(line)
    if not plan.actions:
        typer.echo("nothing to do")
