"""``kvferry simulate``: the options. Heavy imports happen inside, so that ``--help`` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.bench.options import Json, Plot


def simulate_command(
    trace: Annotated[
        str, typer.Option(help="A kind of load, as for bench serve, or a file in Mooncake's format.")
    ] = "multi-turn",
    workers: Annotated[str, typer.Option(help="As 32P32D.")] = "4P4D",
    policy: Annotated[str, typer.Option(help="Several with commas, or all.")] = "cost,round_robin",
    requests: Annotated[int, typer.Option(min=1, help="Of the trace, at most.")] = 10_000,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second; default: a file's own times, else by --load.")
    ] = None,
    load: Annotated[
        str, typer.Option(help="Of what the workers could do if nothing were cached. Several with commas.")
    ] = "0.7",
    seed: Annotated[int, typer.Option(min=0, help="Of the trace and of when heartbeats come.")] = 0,
    profile: Annotated[
        str, typer.Option(help="smollm2-cpu, a100-llama8b, h100-llama8b, h100x8-llama70b, or a JSON file.")
    ] = "h100-llama8b",
    link_gbps: Annotated[float, typer.Option(min=0.001, max=1e5, help="Of each worker, in Gbit/s.")] = 100.0,
    latency: Annotated[float, typer.Option(min=0, max=10, help="Of a message, in seconds.")] = 2e-4,
    routers: Annotated[int, typer.Option(min=1, max=64, help="Requests take turns at them.")] = 1,
    ttft_target: Annotated[
        float, typer.Option(min=0, help="Seconds; a request that is not predicted to meet it is refused. 0: none.")
    ] = 0.0,
    local_prefill: Annotated[
        str, typer.Option(help="When decode workers compute prompts: never, fallback, auto or always.")
    ] = "fallback",
    admission: Annotated[
        bool, typer.Option("--admission", help="Requests wait for their turn, or are refused, by the targets of --slo.")
    ] = False,
    tenants: Annotated[
        str, typer.Option(help="As heavy=9,light=1: what each sends of all conversations. Default: one sends all.")
    ] = "",
    slo: Annotated[str, typer.Option(help="As ttft=1,tpot=0.05; default: the profile's.")] = "",
    failures: Annotated[
        str, typer.Option(help="As decode-3@20+10: dies after 20 s, and is back 10 s later. Several with commas.")
    ] = "",
    autoscale: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A cluster's file: workers come and go by its scale: {auto: ...}."),
    ] = None,
    startup: Annotated[float, typer.Option(min=0, help="Seconds until a worker that is wanted serves.")] = 60.0,
    max_tokens: Annotated[int, typer.Option(min=64, max=1 << 20, help="Of a prompt and its answer.")] = 32_768,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Run a trace through a simulated cluster, with the router's own placement, once for each load and policy.

    The clock is the simulation's: a thousand workers and a million requests take minutes.
    """
    from dataclasses import replace
    from importlib.metadata import version
    from itertools import product

    from rich.progress import Progress

    from cluster.bench.output import standard_output, tell, write_json
    from cluster.bench.picture import check_files
    from cluster.bench.traces.kind import KINDS
    from cluster.bench.traces.options import TraceOptions
    from cluster.bench.traces.registry import stream_trace
    from cluster.config_file import load_config
    from cluster.signals import exit_on_terminate
    from cluster.simulation.elastic_fleet import fleet_line
    from cluster.simulation.elasticity import Elasticity
    from cluster.simulation.figures import SimulationReport, remarks, simulation_table, tenant_table
    from cluster.simulation.picture import write_plot
    from cluster.simulation.profile import profile_of
    from cluster.simulation.rate import SAMPLE, capacity
    from cluster.simulation.scenario import (
        Scenario,
        parse_failures,
        parse_loads,
        parse_local_prefill,
        parse_policies,
        parse_slo,
        parse_workers,
    )
    from cluster.simulation.simulation import Simulation
    from cluster.simulation.tenants import parse_tenants
    from router.slo.classes import SLOClass, SLOConfig

    check_files(json, plot)
    engine = profile_of(profile)
    prefill, decode = parse_workers(workers)
    ttft, tpot = parse_slo(slo, engine)
    scenario = Scenario(
        profile=engine,
        prefill=prefill,
        decode=decode,
        routers=routers,
        seed=seed,
        link=link_gbps * 1e9 / 8,
        latency=latency,
        ttft_target=ttft_target,
        local_prefill=parse_local_prefill(local_prefill),
        ttft=ttft,
        tpot=tpot,
        failures=parse_failures(failures),
        elasticity=None if autoscale is None else Elasticity(auto=load_config(autoscale).scale.auto, startup=startup),
        slo=SLOConfig(classes=(SLOClass(ttft=ttft, tpot=tpot),) if admission else ()),
        tenants=parse_tenants(tenants),
    )
    policies = parse_policies(policy)
    options = TraceOptions(name=trace, requests=requests, rate=rate, seed=seed, max_tokens=max_tokens)
    rates = [rate]
    if rate is None and trace in KINDS:
        sample = stream_trace(replace(options, requests=min(requests, SAMPLE), rate=1.0))
        most = capacity(scenario, sample)
        rates = [each * most for each in parse_loads(load)]
    errors = Console(stderr=True)
    found, fleets = [], []
    with exit_on_terminate(), Progress(console=errors, transient=True, disable=not errors.is_terminal) as bars:
        for each, name in product(rates, policies):
            bar = bars.add_task(name, total=requests)
            simulation = Simulation(replace(scenario, policy=name), stream_trace(replace(options, rate=each)), requests)
            found.append(simulation.run(lambda done, bar=bar: bars.update(bar, completed=done)))  # type: ignore[misc]
            if simulation.fleet is not None:
                fleets.append(fleet_line(name, simulation.fleet))
    report = SimulationReport(
        kvferry=version("kvferry"),
        trace=trace,
        requests=requests,
        rates=tuple(rates),
        seed=seed,
        profile=profile,
        workers=workers,
        routers=routers,
        link_gbps=link_gbps,
        ttft_target=ttft_target,
        local_prefill=local_prefill,
        admission=admission,
        tenants=tenants,
        ttft=ttft,
        tpot=tpot,
        failures=failures,
        figures=tuple(found),
    )
    headline = f"{trace}: {found[0].requests} requests on {workers} of {profile}, {link_gbps:g} Gbit/s each"
    tell(standard_output(), headline, simulation_table(found), (*remarks(report), *fleets))
    if tenants:
        standard_output().print(tenant_table(found))
    if json is not None:
        write_json(report, json)
    if plot is not None:
        write_plot(report, plot)
