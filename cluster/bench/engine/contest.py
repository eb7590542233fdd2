"""``kvferry bench engine`` without its options' spelling: checks first, then runs, then says what was found."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console

from cluster.bench import memory
from cluster.bench.engine.case import EngineCase, EngineGrid
from cluster.bench.engine.figures import (
    EngineOutcome,
    EngineReport,
    engine_remarks,
    engine_table,
    headline,
    summary,
)
from cluster.bench.engine.measure import Effort, measure_case
from cluster.bench.engine.ours import Ours
from cluster.bench.engine.plot import write_engine_plot
from cluster.bench.engine.rivals import RivalOrder, entered
from cluster.bench.engine.work import work_of
from cluster.bench.machine import this_machine
from cluster.bench.output import tell, write_json
from cluster.bench.picture import check_files
from cluster.bench.progress import CaseProgress
from cluster.bench.rivals.contest import Invitation, RivalState
from cluster.bench.roofline import HOST_READ_BYTES, Device, Rates
from cluster.event_loop import new_loop
from cluster.signals import run_until_terminated
from engine.config import EngineConfig
from engine.kv_cache import TORCH_DTYPES
from engine.models.config import ModelConfig
from engine.resolution import resolve_cache_dtype, resolve_device, resolve_dtype
from engine.stepper import Stepper
from protocol.errors import ConfigError
from protocol.layout import ITEMSIZE, PADDING_BLOCK, KVLayout

SPARE_BLOCKS = 2
"""Of each sequence: the scheduler admits nobody who could not grow."""
RIVAL_SHARE = 1.25
"""Cache of a rival by ours: its blocks may be larger, and the last of each sequence is not full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What to measure; the fields are the command's options.

    Attributes:
        engine: as a worker's; pool and sequences are made to fit the cases.
        cpu_time: measure CPU time, of the one thread that there is then.
        rivals: measured beside.
    """

    engine: EngineConfig
    grid: EngineGrid
    seconds: float
    max_pool: int
    seed: int
    cpu_time: bool
    json: Path | None
    plot: Path | None
    rivals: Invitation


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done.

    Attributes:
        config: of the engine, with a pool that every one of ``cases`` fits.
        model: its geometry.
        layout: of the cache.
        device: where.
        cases: that are measured.
        skipped: why the others are not.
    """

    config: EngineConfig
    model: ModelConfig
    layout: KVLayout
    device: torch.device
    cases: tuple[EngineCase, ...]
    skipped: dict[EngineCase, str]


@dataclass(slots=True)
class _Found:
    """What there is so far."""

    outcomes: list[EngineOutcome] = field(default_factory=list)
    rates: list[Rates] = field(default_factory=list)
    rivals: list[RivalState] = field(default_factory=list)
    complete: bool = False


def planned(options: EngineOptions) -> Plan:
    """Which cases can be measured, and what the engine needs for them.

    Raises:
        ConfigError: none can, or an option cannot be.
        ModelError: the model cannot be read.
    """
    config, grid = options.engine, options.grid
    model = ModelConfig.read(Path(config.model))
    device = resolve_device(config.device)
    layout = KVLayout(
        num_layers=model.num_layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        dtype=resolve_cache_dtype(config, resolve_dtype(config, device)),
        order=config.order,
    )
    skipped: dict[EngineCase, str] = {}
    blocks: dict[EngineCase, int] = {}
    for case in grid.cases():
        reason = _hindrance(case, model, layout, options)
        if reason:
            skipped[case] = reason
        else:
            blocks[case] = _blocks(case, layout, grid.steps)
    if not blocks:
        raise ConfigError(f"no case is left: {'; '.join(dict.fromkeys(skipped.values()))}", field="context")
    config = dataclasses.replace(
        config,
        num_blocks=max(blocks.values()),
        max_sequences=max(case.batch for case in blocks),
        max_model_len=max(case.room(grid.steps) for case in blocks),
    )
    return Plan(config, model, layout, device, tuple(blocks), skipped)


def _blocks(case: EngineCase, layout: KVLayout, steps: int) -> int:
    return PADDING_BLOCK + 1 + case.batch * (layout.blocks_for(case.room(steps)) + SPARE_BLOCKS)


def _hindrance(case: EngineCase, model: ModelConfig, layout: KVLayout, options: EngineOptions) -> str:
    grid = options.grid
    if case.room(grid.steps) > model.max_positions:
        return f"the model has {model.max_positions} positions"
    if case.kind == "prefill" and case.batch * case.context > grid.max_prompt_tokens:
        return f"more than --max-prompt-tokens allows ({grid.max_prompt_tokens})"
    if layout.pool_bytes(_blocks(case, layout, grid.steps)) > options.max_pool:
        return f"more cache than --max-pool allows ({options.max_pool >> 20} MiB)"
    return ""


def compare_engines(options: EngineOptions, console: Console) -> bool:
    """Run all cases and print, write and draw what they gave; when interrupted, what there is by then.

    Returns:
        Whether every invited rival took part to the end.

    Raises:
        ConfigError: an option cannot be; said before anything is measured.
        ModelError, EngineFailure: our own engine cannot do it.
    """
    plan = planned(options)
    if options.cpu_time and (plan.config.threads != 1 or plan.device.type != "cpu"):
        raise ConfigError("--cpu-time counts one thread of a CPU: add --threads 1", field="cpu_time")
    check_files(options.json, options.plot)
    pool = plan.layout.pool_bytes(plan.config.num_blocks)
    if plan.device.type == "cpu":
        memory.check_room(int(pool * (1 + RIVAL_SHARE * len(options.rivals.names))) + HOST_READ_BYTES)
    if plan.config.threads is not None:
        torch.set_num_threads(plan.config.threads)
    found = _Found()
    try:
        with CaseProgress(len(plan.cases), Console(stderr=True)) as progress:

            def keep(outcome: EngineOutcome, rates: Rates) -> None:
                found.outcomes.append(outcome)
                found.rates.append(rates)
                progress.finish(outcome.case, summary(outcome))

            run_until_terminated(_run(options, plan, found, keep, progress.show), loop_factory=new_loop)
        found.complete = True
    finally:
        if found.outcomes:
            _tell(_report(options, plan, found), options, console)
    return not any(state.reason for state in found.rivals)


async def _run(
    options: EngineOptions,
    plan: Plan,
    found: _Found,
    keep: Callable[[EngineOutcome, Rates], None],
    show: Callable[[object, float], None],
) -> None:
    effort = Effort(options.grid.steps, options.seconds, options.seed)
    dtype = resolve_dtype(plan.config, plan.device)
    async with AsyncExitStack() as stack:
        show("our engine loads", 0.0)
        stepper = await Stepper.load(plan.config)
        stack.callback(stepper.close)
        now = time.process_time if options.cpu_time else time.perf_counter
        ours = await Ours.made(stepper, now)
        device = await stepper.call(partial(Device, plan.device, TORCH_DTYPES[dtype], now))
        order = RivalOrder(
            model=plan.config.model,
            dtype=dtype,
            device=str(plan.device),
            threads=torch.get_num_threads(),
            max_model_len=stepper.runner.max_model_len,
            max_sequences=plan.config.max_sequences,
            kv_bytes=int(RIVAL_SHARE * plan.layout.pool_bytes(plan.config.num_blocks)),
            cpu_time=options.cpu_time,
        )
        if options.rivals.names:
            show(f"{', '.join(options.rivals.names)} start", 0.0)
        rivals = await stack.enter_async_context(entered(options.rivals, order, found.rivals.append))
        for case in plan.cases:
            work = work_of(case, plan.model, ITEMSIZE[dtype], ITEMSIZE[plan.layout.dtype])

            def on_round(fraction: float, case: EngineCase = case) -> None:
                show(case, fraction)

            keep(*await measure_case(case, work, ours, rivals, device, effort, on_round, found.rivals.append))


def _tell(report: EngineReport, options: EngineOptions, console: Console) -> None:
    tell(console, headline(report), engine_table(report), engine_remarks(report))
    if options.json is not None:
        write_json(report, options.json)
    if options.plot is not None:
        write_engine_plot(report, options.plot)


def _report(options: EngineOptions, plan: Plan, found: _Found) -> EngineReport:
    read, multiply = (statistics.median(values) for values in zip(*found.rates, strict=True))
    left_out = tuple(EngineOutcome(case=case, reason=reason) for case, reason in plan.skipped.items())
    return EngineReport(
        kvferry=version("kvferry"),
        machine=this_machine(),
        device="cpu" if plan.device.type == "cpu" else torch.cuda.get_device_name(plan.device),
        model=Path(plan.config.model).name,
        dtype=resolve_dtype(plan.config, plan.device),
        cache_dtype=plan.layout.dtype,
        attention=plan.config.attention,
        threads=torch.get_num_threads(),
        block_size=plan.config.block_size,
        chunk=plan.config.max_batch_tokens,
        steps=options.grid.steps,
        seed=options.seed,
        cpu_time=options.cpu_time,
        read_gb_per_s=read / 1e9,
        multiply_tflop_per_s=multiply / 1e12,
        rivals=tuple(found.rivals),
        outcomes=(*found.outcomes, *left_out),
        complete=found.complete,
    )
