"""``kvferry bench attention`` without its options' spelling: checks first, then runs, then says what was found."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console

from cluster.bench import memory
from cluster.bench.attention.case import AttentionGrid
from cluster.bench.attention.figures import (
    AttentionOutcome,
    AttentionReport,
    attention_remarks,
    attention_table,
    headline,
)
from cluster.bench.attention.measure import Scene, layers_for, measure_case, working
from cluster.bench.attention.plot import write_attention_plot
from cluster.bench.attention.shape import shape_of
from cluster.bench.attention.step import blocks_of
from cluster.bench.machine import this_machine
from cluster.bench.output import tell, write_json
from cluster.bench.picture import check_files
from cluster.bench.progress import CaseProgress
from cluster.bench.roofline import HOST_READ_BYTES, Device, Rates
from engine.attention.backend import Scoring
from engine.config import EngineConfig
from engine.kv_cache import TORCH_DTYPES
from engine.resolution import resolve_device, resolve_dtype
from protocol.layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """What to measure; the fields are the command's options.

    Attributes:
        engine: model, dtype, device, block size, order and threads; the rest of it is not looked at.
    """

    engine: EngineConfig
    backends: tuple[str, ...]
    grid: AttentionGrid
    window: int
    softcap: float
    seconds: float
    max_pool: int
    seed: int
    json: Path | None
    plot: Path | None


def compare_attention(options: AttentionOptions, console: Console) -> bool:
    """Run all cases and print, write and draw what they gave; when interrupted, what there is by then.

    Returns:
        Whether some backend was measured, and none was wrong.

    Raises:
        ConfigError: an option cannot be; said before anything is measured.
    """
    scene = _scene(options)
    cases = options.grid.cases()
    backends, missing = working(options.backends, scene.layout, scene.device.device)
    outcomes: list[AttentionOutcome] = []
    rates: list[Rates] = []
    complete = False
    try:
        with CaseProgress(len(cases), Console(stderr=True)) as progress:
            for case in cases:

                def show(fraction: float, case: object = case) -> None:
                    progress.show(case, fraction)

                outcome, found = measure_case(case, scene, backends, missing, show)
                outcomes.append(outcome)
                rates.append(found)
                progress.finish(case, _said(outcome))
        complete = True
    finally:
        if outcomes:
            _tell(_report(options, scene, outcomes, rates, complete=complete), options, console)
    states = {figure.state for outcome in outcomes for figure in outcome.figures}
    return "measured" in states and "wrong" not in states


def _scene(options: AttentionOptions) -> Scene:
    engine = options.engine
    shape = shape_of(engine.model)
    place = resolve_device(engine.device)
    layout = KVLayout(
        num_layers=1,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_size=engine.block_size,
        dtype=resolve_dtype(engine, place),
        order=engine.order,
    )
    pools = [
        layers_for(case, layout, options.max_pool) * layout.pool_bytes(blocks_of(case, layout.block_size))
        for case in options.grid.cases()
    ]
    check_files(options.json, options.plot)
    if place.type == "cpu":
        memory.check_room(max(pools) + HOST_READ_BYTES)
    if engine.threads is not None:
        torch.set_num_threads(engine.threads)
    return Scene(
        shape=shape,
        layout=layout,
        scoring=Scoring(shape.head_dim**-0.5, options.window, options.softcap),
        device=Device(place, TORCH_DTYPES[layout.dtype]),
        seconds=options.seconds,
        max_pool=options.max_pool,
        seed=options.seed,
    )


def _tell(report: AttentionReport, options: AttentionOptions, console: Console) -> None:
    tell(console, headline(report), attention_table(report), attention_remarks(report))
    if options.json is not None:
        write_json(report, options.json)
    if options.plot is not None:
        write_attention_plot(report, options.plot)


def _said(outcome: AttentionOutcome) -> str:
    met = [figure for figure in outcome.figures if figure.state != "skipped"]
    return ", ".join(f"{figure.entry} {1e3 * figure.seconds:.3g} ms" for figure in met) or "nobody took part"


def _report(
    options: AttentionOptions,
    scene: Scene,
    outcomes: list[AttentionOutcome],
    rates: list[Rates],
    *,
    complete: bool,
) -> AttentionReport:
    read, multiply = (statistics.median(values) for values in zip(*rates, strict=True))
    return AttentionReport(
        kvferry=version("kvferry"),
        machine=this_machine(),
        device=scene.device.name,
        model=Path(options.engine.model).name,
        shape=scene.shape,
        dtype=scene.layout.dtype,
        order=scene.layout.order,
        block_size=scene.layout.block_size,
        window=options.window,
        softcap=options.softcap,
        threads=torch.get_num_threads(),
        read_gb_per_s=read / 1e9,
        multiply_tflop_per_s=multiply / 1e12,
        outcomes=tuple(outcomes),
        complete=complete,
    )
