"""The ``kvferry`` command. Heavy imports happen inside the commands, so that ``--help`` is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.api_key import ApiKey, CaFile, key_command
from cluster.autoscale_command import autoscale_command
from cluster.bench.command import bench_app
from cluster.config_command import config_app
from cluster.explain_command import explain_command
from cluster.fleet_command import drain_command, logs_command, restart_command, role_command, scale_command
from cluster.model_command import model_app
from cluster.simulation.command import simulate_command
from cluster.sizing.command import plan_command
from cluster.top_command import top_command
from protocol.errors import ClusterError, InvariantViolation, KVFerryError

app = typer.Typer(
    name="kvferry",
    help="Serve large language models with prefill and decode on different machines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(model_app)
app.add_typer(bench_app)
app.add_typer(config_app)
app.command("key")(key_command)
app.command("explain")(explain_command)
app.command("top")(top_command)
app.command("scale")(scale_command)
app.command("drain")(drain_command)
app.command("role")(role_command)
app.command("autoscale")(autoscale_command)
app.command("restart")(restart_command)
app.command("logs")(logs_command)
app.command("simulate")(simulate_command)
app.command("plan")(plan_command)

ERROR_STATUS = 1
INTERNAL_ERROR_STATUS = 70
PIPE_WIDTH = 200

Name = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="Of the cluster; may be left out if only one is up.")
]
Url = Annotated[
    str | None, typer.Option("--url", help="Of the router, with or without /v1; default: the one cluster that is up.")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Output tokens at most.", show_default=True)]
Temperature = Annotated[
    float,
    typer.Option("--temperature", min=0.0, max=2.0, help="0 always takes the likeliest token.", show_default=True),
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Same seed, same text.")]
DEFAULT_MAX_TOKENS = 256
"""An answer on a terminal; without a bound a small model may go on to the end of its context."""


def _show_version(asked: bool) -> None:
    if asked:
        version_command()
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options of every command; ``main`` reads ``--debug`` when an error comes."""


@app.command("up")
def up_command(file: Annotated[Path, typer.Argument(metavar="FILE", help="The cluster's YAML file.")]) -> None:
    """Bring a cluster up and leave it running."""
    from cluster.bring_up import up
    from cluster.config_file import load_config
    from cluster.display import StepPrinter
    from cluster.phases import since_process_start
    from cluster.signals import exit_on_terminate

    clock = since_process_start("command")
    with exit_on_terminate():
        state = up(load_config(file), StepPrinter(Console(stderr=True)), clock=clock)
    typer.echo(f"cluster {state.name!r} serves {state.model} at {state.url}/v1")


@app.command("status")
def status_command(
    name: Name = None, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Show the processes of a cluster and what they do."""
    from cluster.display import print_json, start_lines, status_table, transport_words
    from cluster.placement import unused_line
    from cluster.standard_output import kept_for_the_answer
    from cluster.state import StateStore
    from cluster.status import cluster_report

    store = StateStore()
    with kept_for_the_answer():
        report = cluster_report(name or store.only(), store=store)
    if as_json:
        print_json(report)
        return
    serving = f", {report.model} at {report.url}/v1, {transport_words(report)}" if report.url else ""
    typer.echo(f"cluster {report.name!r}: {report.state}{serving}")
    if report.actors:
        # Whoever reads it through a pipe wants whole words.
        Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(status_table(report))
        if report.unused:
            typer.echo(unused_line(report.unused))
    for line in start_lines(report):
        typer.echo(line)
    if report.actors and report.state == "degraded" and not report.supervised:
        typer.echo("the supervisor does not answer: what dies is not brought back until it does")
    if report.hint:
        raise ClusterError(report.hint)


@app.command("down")
def down_command(
    name: Name = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Clear it away also where the Ray cluster that it joined is gone for good.")
    ] = False,
) -> None:
    """Bring a cluster down; nothing of it is left running."""
    from cluster.bring_up import down
    from cluster.display import StepPrinter
    from cluster.signals import uninterrupted
    from cluster.state import StateStore

    store = StateStore()
    with uninterrupted():
        down(name or store.only(), StepPrinter(Console(stderr=True)), store=store, forget=forget)


@app.command("complete")
def complete_command(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to go on from.")],
    url: Url = None,
    api_key: ApiKey = None,
    ca_file: CaFile = None,
    max_tokens: MaxTokens = DEFAULT_MAX_TOKENS,
    temperature: Temperature = 0.0,
    seed: Seed = None,
) -> None:
    """Continue a prompt, printing the text as it comes."""
    from cluster.conversation import default_url, given, show_stream
    from router.client import Client

    with Client(url or default_url(), api_key=api_key, ca_file=ca_file) as client:
        show_stream(client, prompt, **given(max_tokens=max_tokens, temperature=temperature, seed=seed))


@app.command("chat")
def chat_command(
    message: Annotated[str | None, typer.Argument(metavar="[MESSAGE]", help="Left out: a chat line by line.")] = None,
    url: Url = None,
    api_key: ApiKey = None,
    ca_file: CaFile = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    max_tokens: MaxTokens = DEFAULT_MAX_TOKENS,
    temperature: Temperature = 0.0,
    seed: Seed = None,
) -> None:
    """Chat with the model, printing each answer as it comes."""
    from cluster.conversation import chat_messages, converse, default_url, given, show_stream
    from router.client import Client

    params = given(max_tokens=max_tokens, temperature=temperature, seed=seed)
    with Client(url or default_url(), api_key=api_key, ca_file=ca_file) as client:
        if message is None:
            converse(client, Console(), system=system, params=params)
        else:
            show_stream(client, chat_messages(message, system), **params)


@app.command("demo")
def demo_command(
    oneshot: Annotated[bool, typer.Option("--oneshot", help="End after the first answer.")] = False,
    port: Annotated[int | None, typer.Option("--port", min=0, max=65535, help="Default: 8000, or a free one.")] = None,
) -> None:
    """Bring a whole cluster up on this machine, ask it a question, and show where the time went."""
    from cluster.demo import run_demo

    run_demo(Console(), oneshot=oneshot, port=port)


@app.command("doctor")
def doctor_command(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="A cluster's YAML file to check for.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine, and what FILE asks of it; the status is 1 if something is broken."""
    from cluster.doctor.command import diagnose, show

    report = diagnose(file, Console(stderr=True))
    show(report, as_json=as_json)
    if not report.healthy:
        raise typer.Exit(ERROR_STATUS)


@app.command("version")
def version_command() -> None:
    """Print the version."""
    from importlib.metadata import version

    typer.echo(f"kvferry {version('kvferry')}")


def main() -> None:
    """Run the command; an error is one line on standard error and a non-zero status."""
    try:
        app()
    except KVFerryError as error:
        _complain(error, f"{error.message}", INTERNAL_ERROR_STATUS if _ours(error) else ERROR_STATUS)
    except Exception as error:
        _complain(error, f"unexpected {type(error).__name__}: {error}", INTERNAL_ERROR_STATUS)


def _ours(error: KVFerryError) -> bool:
    return isinstance(error, InvariantViolation)


def _complain(error: Exception, message: str, status: int) -> None:
    if "--debug" in sys.argv:
        raise error
    typer.echo(f"kvferry: {message}", err=True)
    raise SystemExit(status)
