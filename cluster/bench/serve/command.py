"""``kvferry bench serve``: the options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from cluster.api_key import ApiKey, CaFile, KeyFile, shown_key
from cluster.bench.options import Json, Plot

N = TypeVar("N", int, float)

DEFAULT_REQUESTS = 100


def serve_command(
    url: Annotated[
        str | None, typer.Option("--url", help="Of any server with OpenAI's API; default: the cluster that is up.")
    ] = None,
    vs: Annotated[str | None, typer.Option("--vs", metavar="URL", help="Of another, which takes turns.")] = None,
    trace: Annotated[
        str,
        typer.Option(
            help="poisson, bursts, sharegpt, long-prompt, multi-turn, agentic, no-reuse, or a file as Mooncake's."
        ),
    ] = "sharegpt",
    rate: Annotated[float | None, typer.Option(help="Requests a second; 1, or a file's own times, by default.")] = None,
    ramp: Annotated[str | None, typer.Option(metavar="A:B", help="In place of --rate: from A to B a second.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="In place of --rate: so many under way, whatever the trace's times.")
    ] = None,
    burstiness: Annotated[
        float | None, typer.Option(help="Of arrivals: 1 is Poisson, less comes in bursts, inf at equal distances.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help=f"By default {DEFAULT_REQUESTS}, or as --seconds has it.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="No request comes later.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Mean of a first message; as the trace has it.")] = None,
    output_tokens: Annotated[int | None, typer.Option(help="Mean of an answer; as the trace has it.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Of prompt and answer: longer ones are cut. By default the server's context.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="The first that is served by default.")] = None,
    vs_model: Annotated[str | None, typer.Option(help="Of the other.")] = None,
    slo: Annotated[
        str | None, typer.Option(metavar="TARGETS", help="As ttft=500ms,tpot=50ms,e2e=10s: what is good.")
    ] = None,
    slice_: Annotated[int, typer.Option("--slice", help="Requests until it is the other's turn.")] = 32,
    warmup: Annotated[int, typer.Option(help="Requests before, which do not count.")] = 4,
    timeout: Annotated[float, typer.Option(help="Seconds that an answer may take.")] = 600.0,
    vocabulary: Annotated[
        str, typer.Option(metavar="A:B", help="Prompts are drawn from these ids, with no special token among them.")
    ] = "100:31999",
    seed: Annotated[int, typer.Option(min=0, help="Of the trace.")] = 0,
    salt: Annotated[
        str | None, typer.Option(help="Of the prompts: one that was used before meets what is cached.")
    ] = None,
    api_key: ApiKey = None,
    api_key_file: KeyFile = None,
    vs_api_key_file: KeyFile = None,
    ca_file: CaFile = None,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Put load on any server with OpenAI's API (kvferry, vLLM, SGLang): arrivals that wait for no answer.

    TTFT, TPOT, ITL and whole answers, the share within targets, and what of all this is the generator's own doing.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from cluster.bench.output import standard_output, tell, write_json
    from cluster.bench.picture import check_files
    from cluster.bench.serve.measure import ServeOptions, measure_serve
    from cluster.bench.serve.plot import write_serve_plot
    from cluster.bench.serve.report import headline, remarks, server_table, time_table
    from cluster.bench.serve.server import Address
    from cluster.bench.serve.target import parse_target
    from cluster.bench.traces.options import DEFAULT_LIMIT, TraceOptions
    from cluster.conversation import default_url
    from cluster.event_loop import new_loop
    from cluster.signals import exit_on_terminate, run_until_terminated

    first, last = _pace(trace, rate, ramp, concurrency)
    shape: dict[str, Any] = {"burstiness": burstiness, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    options = ServeOptions(
        servers=(
            Address(url or default_url(), model, shown_key(api_key, api_key_file), ca_file),
            *(() if vs is None else (Address(vs, vs_model, shown_key(None, vs_api_key_file), ca_file),)),
        ),
        trace=TraceOptions(
            name=trace,
            requests=_requests(requests, seconds, first, last, concurrency),
            rate=first,
            rate_end=last,
            seed=seed,
            max_tokens=DEFAULT_LIMIT if max_tokens is None else max_tokens,
            **shape,
        ),
        concurrency=concurrency,
        seconds=seconds,
        slice=slice_,
        target=None if slo is None else parse_target(slo),
        warm=warmup,
        patience=timeout,
        token_ids=_pair(vocabulary, int, field="vocabulary"),
        salt=salt,
    )
    check_files(json, plot)
    errors = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with (
        exit_on_terminate(),
        Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bars,
    ):
        bar, failed = bars.add_task("", total=None if seconds else options.trace.requests * len(options.servers)), 0

        def show(good: bool) -> None:
            nonlocal failed
            failed += not good
            bars.update(bar, advance=1, description=f"{failed} failed" if failed else "")

        report = run_until_terminated(measure_serve(options, show), loop_factory=new_loop)
    out = standard_output()
    tell(out, headline(report), server_table(report), ())
    tell(out, "", time_table(report), remarks(report))
    if json is not None:
        write_json(report, json)
    if plot is not None:
        write_serve_plot(report, plot)
    if not all(server.completed for server in report.servers):
        raise typer.Exit(1)


def _pace(
    trace: str, rate: float | None, ramp: str | None, concurrency: int | None
) -> tuple[float | None, float | None]:
    """The first and the last rate."""
    from cluster.bench.traces.kind import KINDS
    from protocol.errors import ConfigError

    if sum(value is not None for value in (rate, ramp, concurrency)) > 1:
        raise ConfigError("--rate, --ramp and --concurrency are three ways: give one", field="rate")
    if ramp is not None:
        return _pair(ramp, float, field="ramp")
    if trace not in KINDS:
        return rate, None
    # Of a fixed number under way the trace's times say only which conversations are due.
    return (rate or float(concurrency or 1), None)


def _requests(
    requests: int | None, seconds: float | None, first: float | None, last: float | None, concurrency: int | None
) -> int:
    from cluster.bench.traces.options import MAX_REQUESTS

    if requests is not None:
        return requests
    if seconds is None:
        return DEFAULT_REQUESTS
    if concurrency is not None or first is None:
        return MAX_REQUESTS
    return max(1, min(MAX_REQUESTS, round(seconds * (first + (first if last is None else last)) / 2.0)))


def _pair(text: str, kind: Callable[[str], N], *, field: str) -> tuple[N, N]:
    from protocol.errors import ConfigError

    one, _, other = text.partition(":")
    try:
        return kind(one), kind(other)
    except ValueError as error:
        raise ConfigError(f"{field} must be two numbers as 1:10, got {text!r}", field=field) from error
