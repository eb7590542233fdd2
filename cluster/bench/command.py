"""``kvferry bench``: the options. Heavy imports happen inside the commands, so that ``--help`` is quick."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.api_key import ApiKey, CaFile
from cluster.bench.attention.shape import DEFAULT_SHAPE, SHAPES
from cluster.bench.disaggregation.command import disaggregation_command
from cluster.bench.options import BlockSize, CaseSeconds, DeviceName, Json, Order, Plot, RivalPython, Threads
from cluster.bench.preset import DEFAULT_PRESET, PRESETS
from cluster.bench.serve.command import serve_command

bench_app = typer.Typer(name="bench", help="Measure what this machine and a cluster reach.", no_args_is_help=True)
bench_app.command("disaggregation")(disaggregation_command)
bench_app.command("serve")(serve_command)

OUTPUT_TOKENS = 16


@bench_app.command("transfer")
def transfer_command(
    model: Annotated[
        str, typer.Option("--model", help=f"A directory with a model's config.json, or one of: {', '.join(PRESETS)}.")
    ] = DEFAULT_PRESET,
    tokens: Annotated[str, typer.Option(help="Of a transfer, as 1,512,128k.")] = "16,512,4k",
    tables: Annotated[str, typer.Option(help="Block tables: contiguous, scattered.")] = "contiguous,scattered",
    ways: Annotated[str, typer.Option(help="Ship whole, or chunked by 512 tokens.")] = "whole,chunked",
    concurrency: Annotated[str, typer.Option(help="Transfers at once, as 1,4.")] = "1",
    transports: Annotated[
        str, typer.Option(help="As tcp,shm,ucx:tcp (UCX held to TCP) or ucx:shm; all tries each scheme.")
    ] = "all",
    block_size: BlockSize = 16,
    dtype: Annotated[str, typer.Option(help="Of the cache.")] = "bfloat16",
    streams: Annotated[int | None, typer.Option(min=1, max=64, help="Connections of one transport.")] = None,
    seconds: CaseSeconds = 1.0,
    time_limit: Annotated[float, typer.Option(min=0.1, max=86400, help="Give a case up after so long.")] = 60.0,
    max_pool: Annotated[str, typer.Option(help="No pool of either side is larger.")] = "2GiB",
    seed: Annotated[int, typer.Option(min=0, help="Of scattered block tables and of the bytes.")] = 0,
    connect: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Measure with the one that listens there.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Be the receiving side, until Ctrl-C; trust who comes.")
    ] = None,
    vs: Annotated[str | None, typer.Option(help="Also measure rivals on the same work: nixl, mooncake.")] = None,
    vs_python: RivalPython = None,
    json: Json = None,
    plot: Plot = None,
    tied: Annotated[bool, typer.Option("--tied", hidden=True)] = False,
) -> None:
    """Measure the KV transports between two processes, or with --connect and --listen between two machines.

    Each case takes turns with the machine's own limit for the same bytes: a memory copy, or a plain socket.
    """
    from cluster.bench.case import TABLES, WAYS, Grid, parse_choices, parse_count, parse_counts
    from cluster.bench.output import standard_output
    from cluster.bench.rivals.contest import RIVALS, Invitation
    from cluster.bench.transfer import Options, be_far_end, measure_transfers, parse_place
    from cluster.signals import exit_on_terminate
    from kv_transfer.transport import SCHEMES
    from protocol.errors import ConfigError

    if connect is not None and listen is not None:
        raise ConfigError("--connect and --listen are for the two sides: give one of them", field="connect")
    limit = parse_count(max_pool, field="max_pool")
    if listen is not None:
        with exit_on_terminate():
            be_far_end(*parse_place(listen, field="listen"), max_pool=limit, tied=tied)
        return
    grid = Grid(
        transports=tuple(SCHEMES) if transports == "all" else tuple(name.strip() for name in transports.split(",")),
        tokens=parse_counts(tokens, field="tokens"),
        tables=parse_choices(tables, TABLES, field="tables"),
        ways=parse_choices(ways, WAYS, field="ways"),
        concurrency=parse_counts(concurrency, field="concurrency"),
    )
    options = Options(
        model=model,
        block_size=block_size,
        dtype=dtype,
        grid=grid,
        streams=streams,
        seconds=seconds,
        time_limit=time_limit,
        max_pool=limit,
        seed=seed,
        peer=None if connect is None else parse_place(connect, field="connect"),
        json=json,
        plot=plot,
        rivals=Invitation(
            () if vs is None else parse_choices(vs, tuple(RIVALS), field="vs"), vs_python or sys.executable
        ),
    )
    with exit_on_terminate():
        complete = measure_transfers(options, standard_output())
    if not complete:
        raise typer.Exit(1)


@bench_app.command("handoff")
def handoff_command(
    model: Annotated[
        str, typer.Option("--model", help=f"A directory with a model's config.json, or one of: {', '.join(PRESETS)}.")
    ] = DEFAULT_PRESET,
    tokens: Annotated[str, typer.Option(help="Of a prompt, as 16,512,4k.")] = "16,512,4k",
    transports: Annotated[str, typer.Option(help="As shm,tcp,ucx,ucx:tcp.")] = "shm,tcp",
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a chunk of prefill.")] = 512,
    pause: Annotated[float, typer.Option(min=0, max=10, help="Seconds that a chunk takes to compute.")] = 0.02,
    runs: Annotated[int, typer.Option(min=1, help="Of each length, after some that do not count.")] = 50,
    block_size: BlockSize = 16,
    max_pool: Annotated[str, typer.Option(help="No pool of either side is larger.")] = "2GiB",
    json: Json = None,
    decode: Annotated[bool, typer.Option("--decode", hidden=True)] = False,
) -> None:
    """Measure the handoff itself: from the end of a prompt's last chunk to its blocks' commit on the decode side.

    Two processes with a prefill and a decode worker's bookkeeping, sockets and pools, and no model.
    """
    from rich.progress import Progress

    from cluster.bench.case import parse_count, parse_counts
    from cluster.bench.handoff import decode_side
    from cluster.bench.handoff.figures import handoff_table, headline
    from cluster.bench.handoff.measure import WARM_UP, HandoffOptions, measure_handoff
    from cluster.bench.output import standard_output, write_json
    from cluster.event_loop import new_loop
    from cluster.signals import exit_on_terminate, run_until_terminated

    if decode:
        run_until_terminated(decode_side.serve(), loop_factory=new_loop)
        return
    options = HandoffOptions(
        model=model,
        block_size=block_size,
        transports=tuple(name.strip() for name in transports.split(",")),
        tokens=parse_counts(tokens, field="tokens"),
        chunk=chunk,
        pause=pause,
        runs=runs,
        max_pool=parse_count(max_pool, field="max_pool"),
    )
    errors = Console(stderr=True)
    with exit_on_terminate(), Progress(console=errors, transient=True, disable=not errors.is_terminal) as bars:
        bar = bars.add_task("", total=WARM_UP + runs)
        report = run_until_terminated(
            measure_handoff(options, lambda name, turn: bars.update(bar, completed=turn, description=name)),
            loop_factory=new_loop,
        )
    out = standard_output()
    out.print(headline(report), highlight=False)
    out.print(handoff_table(report))
    for name, reason in report.skipped.items():
        out.print(f"* skipped {name}: {reason}", markup=False, highlight=False)
    if json is not None:
        write_json(report, json)
    if not report.rows:
        raise typer.Exit(1)


@bench_app.command("router")
def router_command(
    model: Annotated[
        str, typer.Option("--model", help="A known name, or the directory of a checkpoint; only its tokenizer is used.")
    ] = DEFAULT_PRESET,
    runs: Annotated[int, typer.Option(min=1, help="First tokens; a tenth as often a client leaves.")] = 500,
    streams: Annotated[str, typer.Option(help="Side by side, as 1,64.")] = "64",
    rate: Annotated[float, typer.Option(min=1, help="Tokens a second over all streams.")] = 5000.0,
    seconds: Annotated[float, typer.Option(min=0.01, max=3600, help="That streams take at that rate.")] = 5.0,
    requests: Annotated[int, typer.Option(min=0, help="Short ones, over which memory is looked at.")] = 10_000,
    json: Json = None,
) -> None:
    """Measure what a router costs: three processes, with workers that have no model and answer at once.

    Where there are two cores, the router has one to itself.
    """
    from cluster.bench.case import parse_counts
    from cluster.bench.output import standard_output, write_json
    from cluster.bench.router.figures import stream_table, summary
    from cluster.bench.router.measure import RouterOptions, measure_router
    from cluster.event_loop import new_loop
    from cluster.model_store import resolve_model
    from cluster.signals import exit_on_terminate, run_until_terminated

    options = RouterOptions(
        tokenizer=resolve_model(model),
        runs=runs,
        streams=parse_counts(streams, field="streams"),
        tokens_per_second=rate,
        seconds=seconds,
        requests=requests,
    )
    errors = Console(stderr=True)
    with exit_on_terminate(), errors.status("starting") as status:
        report = run_until_terminated(measure_router(options, status.update), loop_factory=new_loop)
    out = standard_output()
    for line in summary(report):
        out.print(line, highlight=False)
    out.print(stream_table(report))
    if json is not None:
        write_json(report, json)


@bench_app.command("attention")
def attention_command(
    model: Annotated[
        str, typer.Option("--model", help=f"A directory with a model's config.json, or one of: {', '.join(SHAPES)}.")
    ] = DEFAULT_SHAPE,
    backends: Annotated[str, typer.Option(help="As sdpa,triton; all are those that work here.")] = "all",
    kinds: Annotated[str, typer.Option(help="Steps: decode, prefill.")] = "decode,prefill",
    batch: Annotated[str, typer.Option(help="Sequences of a decode step.")] = "1,8,32",
    prompts: Annotated[str, typer.Option(help="Sequences of a prefill step.")] = "1",
    context: Annotated[str, typer.Option(help="Tokens of each sequence, those of the step included.")] = "128,1k,4k",
    chunk: Annotated[int, typer.Option(help="Tokens of a prompt that a step computes.")] = 512,
    device: DeviceName = "auto",
    dtype: Annotated[str, typer.Option(help="Of queries and cache; auto is what the device computes in.")] = "auto",
    order: Order = "NHD",
    block_size: BlockSize = 16,
    window: Annotated[int, typer.Option(min=0, help="Tokens that a query sees; 0 for all.")] = 0,
    softcap: Annotated[float, typer.Option(min=0, max=1e6, help="Cap of the scores; 0 for none.")] = 0.0,
    threads: Threads = None,
    seconds: CaseSeconds = 1.0,
    max_pool: Annotated[str, typer.Option(help="No pool is larger.")] = "2GiB",
    seed: Annotated[int, typer.Option(min=0, help="Of numbers, block tables and turns.")] = 0,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Compare the attention backends that work on this machine, and hold them against its roofline."""
    from cluster.bench.attention.case import KINDS, AttentionGrid
    from cluster.bench.attention.contest import AttentionOptions, compare_attention
    from cluster.bench.case import parse_choices, parse_count, parse_counts
    from cluster.bench.output import standard_output
    from cluster.signals import exit_on_terminate
    from engine.attention import BACKENDS
    from engine.config import EngineConfig

    grid = AttentionGrid(
        kinds=parse_choices(kinds, KINDS, field="kinds"),
        decodes=parse_counts(batch, field="batch"),
        prompts=parse_counts(prompts, field="prompts"),
        contexts=parse_counts(context, field="context"),
        chunk=chunk,
    )
    settings: Any = {"dtype": dtype, "device": device, "block_size": block_size, "order": order, "threads": threads}
    options = AttentionOptions(
        engine=EngineConfig(model=model, **settings),
        backends=parse_choices(backends, BACKENDS, field="backends"),
        grid=grid,
        window=window,
        softcap=softcap,
        seconds=seconds,
        max_pool=parse_count(max_pool, field="max_pool"),
        seed=seed,
        json=json,
        plot=plot,
    )
    with exit_on_terminate():
        good = compare_attention(options, standard_output())
    if not good:
        raise typer.Exit(1)


@bench_app.command("engine")
def engine_command(
    model: Annotated[
        str, typer.Option("--model", help="A directory with a model, or a known name (kvferry model list).")
    ] = DEFAULT_SHAPE,
    kinds: Annotated[str, typer.Option(help="Steps: decode, prefill.")] = "decode,prefill",
    batch: Annotated[str, typer.Option(help="Sequences of a decode.")] = "1,8,32",
    prompts: Annotated[str, typer.Option(help="Sequences of a prefill.")] = "1,8,32",
    context: Annotated[
        str, typer.Option(help="Tokens of each sequence, those of the step included.")
    ] = "128,1k,4k,16k",
    steps: Annotated[int, typer.Option(help="Of a decode, in each round.")] = 8,
    max_prompt_tokens: Annotated[str, typer.Option(help="Prefills of more tokens in all are left out.")] = "16k",
    chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens of one step.")] = 512,
    device: DeviceName = "auto",
    dtype: Annotated[str, typer.Option(help="Of weights; auto is what the device computes in.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, float8_e4m3 or float8_e5m2.")] = "auto",
    attention: Annotated[str, typer.Option(help="Backend; auto fits the device.")] = "auto",
    order: Order = "NHD",
    block_size: BlockSize = 16,
    threads: Threads = None,
    seconds: CaseSeconds = 2.0,
    max_pool: Annotated[str, typer.Option(help="Cases that need a larger cache are left out.")] = "4GiB",
    seed: Annotated[int, typer.Option(min=0, help="Of the turns.")] = 0,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="Of the one thread, where others share its core.")
    ] = False,
    vs: Annotated[str | None, typer.Option(help="Also measure rivals on the same work: transformers, vllm.")] = None,
    vs_python: RivalPython = None,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Measure steps of the engine, as the workers drive it, against this machine's roofline and other engines."""
    from cluster.bench.case import parse_choices, parse_count, parse_counts
    from cluster.bench.engine.case import KINDS, EngineGrid
    from cluster.bench.engine.contest import EngineOptions, compare_engines
    from cluster.bench.engine.rivals import RIVALS
    from cluster.bench.output import standard_output
    from cluster.bench.rivals.contest import Invitation
    from cluster.model_command import show_progress
    from cluster.model_store import resolve_model
    from cluster.signals import exit_on_terminate
    from engine.config import EngineConfig

    grid = EngineGrid(
        kinds=parse_choices(kinds, KINDS, field="kinds"),
        decodes=parse_counts(batch, field="batch"),
        prompts=parse_counts(prompts, field="prompts"),
        contexts=parse_counts(context, field="context"),
        steps=steps,
        max_prompt_tokens=parse_count(max_prompt_tokens, field="max_prompt_tokens"),
    )
    settings: Any = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "device": device, "attention": attention}
    settings |= {"order": order, "block_size": block_size, "max_batch_tokens": chunk, "threads": threads}
    with exit_on_terminate():
        with show_progress(Console(stderr=True), model) as progress:
            directory = resolve_model(model, progress)
        options = EngineOptions(
            engine=EngineConfig(model=str(directory), **settings),
            grid=grid,
            seconds=seconds,
            max_pool=parse_count(max_pool, field="max_pool"),
            seed=seed,
            cpu_time=cpu_time,
            json=json,
            plot=plot,
            rivals=Invitation(
                () if vs is None else parse_choices(vs, tuple(RIVALS), field="vs"), vs_python or sys.executable
            ),
        )
        good = compare_engines(options, standard_output())
    if not good:
        raise typer.Exit(1)


@bench_app.command("latency")
def latency_command(
    url: Annotated[str | None, typer.Option("--url", help="Of the router; default: the cluster that is up.")] = None,
    api_key: ApiKey = None,
    ca_file: CaFile = None,
    runs: Annotated[int, typer.Option(min=1, help="Of each length, after one that does not count.")] = 7,
    lengths: Annotated[str, typer.Option(help="Prompt tokens.")] = "16,64,256,900",
    cached: Annotated[
        int, typer.Option(min=0, help="Also longer prompts of which so many tokens were asked for before.")
    ] = 0,
    output_tokens: Annotated[int, typer.Option(min=2, help="Of each answer.")] = OUTPUT_TOKENS,
    json: Json = None,
) -> None:
    """Show where the time of a request goes, by prompt length, on a cluster that is up."""
    from rich.progress import track

    from cluster.bench.case import parse_counts
    from cluster.bench.latency import cases, measure, row_table, summary
    from cluster.bench.output import standard_output, write_json
    from cluster.conversation import default_url
    from router.client import Client

    wanted = cases(parse_counts(lengths, field="lengths"), cached)
    errors = Console(stderr=True)
    with Client(url or default_url(), api_key=api_key, ca_file=ca_file) as client:
        turns = measure(client, wanted, runs, output_tokens)
        found = list(track(turns, total=runs, description="runs", console=errors, disable=not errors.is_terminal))
    rows = [summary(case.length, [turn[case] for turn in found], output_tokens) for case in wanted]
    table = row_table(rows, runs=runs, output_tokens=output_tokens)
    standard_output().print(table)
    if json is not None:
        write_json(rows, json)
