"""``kvferry doctor``: reads the file, has the checks made, and shows what they found."""

from __future__ import annotations

import sys
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.config import ClusterConfig
from cluster.config_file import load_config
from cluster.demo import laptop_config
from cluster.display import print_json
from cluster.doctor.examination import examine
from cluster.doctor.finding import Diagnosis, Finding, diagnosis
from cluster.doctor.wish import Wish
from cluster.plan import check_orders, planned_orders
from protocol.errors import ConfigError

COLOURS = {"ok": "green", "note": "dim", "warning": "yellow", "broken": "bold red"}


def diagnose(file: Path | None, console: Console) -> Diagnosis:
    """Make every check; a file that is wrong is a finding, and the default cluster is looked at in its place."""
    wish, first = _wish(file)
    with console.status("examining this machine") as status:
        return diagnosis((*first, *examine(wish, lambda name: status.update(f"examined {name}"))))


def show(report: Diagnosis, *, as_json: bool) -> None:
    """Print the report: a table on a terminal, else a line for each finding, or JSON."""
    if as_json:
        print_json(report)
    elif sys.stdout.isatty():
        console = Console()
        console.print(table(report))
        console.print(_summary(report), highlight=False)
    else:
        for finding in report.findings:
            typer.echo(line(finding))
        typer.echo(_summary(report))


def line(finding: Finding) -> str:
    """One finding in one line."""
    fix = f" -- fix: {finding.fix}" if finding.fix else ""
    return f"{finding.verdict:<8}{finding.check}: {finding.said}{fix}"


def table(report: Diagnosis) -> Table:
    """The findings for a terminal, a row each."""
    rows = Table(box=None, pad_edge=False)
    rows.add_column("check", no_wrap=True)
    rows.add_column("", no_wrap=True)
    rows.add_column("found")
    for finding in report.findings:
        fix = f"\n[bold]fix:[/bold] {escape(finding.fix)}" if finding.fix else ""
        colour = COLOURS[finding.verdict]
        rows.add_row(finding.check, f"[{colour}]{finding.verdict}[/{colour}]", f"{escape(finding.said)}{fix}")
    return rows


def _wish(file: Path | None) -> tuple[Wish, tuple[Finding, ...]]:
    if file is None:
        return Wish(config=laptop_config()), ()
    try:
        config = load_config(file)
        check_orders(planned_orders(config), Path(config.model))
    except ConfigError as error:
        fix = "see deploy/laptop.yaml for every key"
        return Wish(config=laptop_config()), (Finding(check="file", verdict="broken", said=error.message, fix=fix),)
    return Wish(config=config, given=True), (_file_finding(file, config),)


def _file_finding(file: Path, config: ClusterConfig) -> Finding:
    roles = f"{config.prefill.replicas} prefill, {config.decode.replicas} decode"
    return Finding(check="file", verdict="ok", said=f"{file}: cluster {config.name!r}, {roles}, {config.model}")


def _summary(report: Diagnosis) -> str:
    count = {verdict: sum(each.verdict == verdict for each in report.findings) for verdict in COLOURS}
    if report.healthy:
        return f"nothing is broken, {count['warning']} warnings"
    return f"{count['broken']} broken, {count['warning']} warnings"
