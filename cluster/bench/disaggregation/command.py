"""``kvferry bench disaggregation``: the options."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from cluster.bench.options import Json, Plot


def disaggregation_command(
    model: Annotated[str, typer.Option("--model", help="A known name, or a Hugging Face directory.")] = "smollm2-135m",
    tokens: Annotated[str, typer.Option(help="Of a prompt alone, as 1k,2k,4k.")] = "1k,2k,4k",
    output: Annotated[int, typer.Option(min=3, help="Tokens of an answer.")] = 16,
    runs: Annotated[int, typer.Option(min=1, help="Of each length and way, after one that does not count.")] = 7,
    chunk: Annotated[int, typer.Option(min=16, help="Tokens of a step of prefill.")] = 512,
    step_tokens: Annotated[
        str, typer.Option(help="Of a step of the engine that does both; several, as 64,256, are several engines.")
    ] = "256",
    streams: Annotated[int, typer.Option(min=1, help="That decode while long prompts arrive.")] = 8,
    long: Annotated[str, typer.Option(help="Tokens of a long prompt.")] = "2k",
    interval: Annotated[float, typer.Option(min=0.01, help="Seconds between two of them.")] = 4.0,
    seconds: Annotated[float, typer.Option(min=0.0, help="Of mixed load for each way; 0 leaves it out.")] = 20.0,
    rounds: Annotated[int, typer.Option(min=1, help="Of mixed load; the ways take turns.")] = 1,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Measure what it buys that prefill and decode are apart: on two cores, against one engine that does both on them.

    One request at a time with the same decode worker, and streams that decode while long prompts arrive.
    """
    from rich.progress import Progress

    from cluster.bench.case import parse_count, parse_counts
    from cluster.bench.disaggregation.figures import alone_table, load_table, p99_ratio
    from cluster.bench.disaggregation.measure import DisaggregationOptions, measure_disaggregation
    from cluster.bench.disaggregation.plot import write_disaggregation_plot
    from cluster.bench.output import standard_output, write_json
    from cluster.bench.picture import check_files
    from cluster.event_loop import new_loop
    from cluster.model_store import resolve_model
    from cluster.signals import exit_on_terminate, run_until_terminated

    options = DisaggregationOptions(
        model=resolve_model(model),
        tokens=parse_counts(tokens, field="tokens"),
        output=output,
        runs=runs,
        chunk=chunk,
        step_tokens=parse_counts(step_tokens, field="step_tokens"),
        streams=streams,
        long=parse_count(long, field="long"),
        interval=interval,
        seconds=seconds,
        rounds=rounds,
    )
    check_files(json, plot)
    errors = Console(stderr=True)
    with exit_on_terminate(), Progress(console=errors, transient=True, disable=not errors.is_terminal) as bars:
        bar = bars.add_task("starting", total=None)
        report = run_until_terminated(
            measure_disaggregation(options, lambda what: bars.update(bar, description=what)), loop_factory=new_loop
        )
    out = standard_output()
    out.print(alone_table(report.alone))
    if report.load:
        out.print(load_table(report))
    ratio = p99_ratio(report)
    if ratio is not None:
        out.print(f"p99 between two tokens, 1P1D to the best that does both: {ratio:.2f}", highlight=False)
    if json is not None:
        write_json(report, json)
    if plot is not None:
        write_disaggregation_plot(report, plot)
