"""Runs the benchmark of attention, case by case; backends and the device's limits take turns within a case."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from cluster.bench.attention.case import AttentionCase
from cluster.bench.attention.figures import AttentionOutcome, EntryFigure
from cluster.bench.attention.shape import HeadShape
from cluster.bench.attention.step import Step, blocks_of
from cluster.bench.attention.work import work_of
from cluster.bench.roofline import Device, Rates, floor
from cluster.bench.statistics import paired_ratio
from engine.attention import create_backend
from engine.attention.backend import AttentionBackend, Scoring
from engine.kv_cache import TORCH_DTYPES
from protocol.errors import ConfigError, KVFerryError
from protocol.layout import KVLayout

MAX_LAYERS = 4
MIN_ROUNDS = 3
REFERENCE_ROWS = 512
"""The reference computes query by query and head by head, in Python; more of them take seconds a layer."""
ROUNDING = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Error that is not a fault's."""

OnRound = Callable[[float], None]
"""Called with the share of a case that is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What all cases share.

    Attributes:
        shape: of the heads.
        layout: of one layer's cache.
        scoring: of every layer.
        device: where, and what it can do.
        seconds: measure each case for so long.
        max_pool: bytes; a pool has as many layers as fit, up to :data:`MAX_LAYERS`.
        seed: of numbers, block tables and turns.
    """

    shape: HeadShape
    layout: KVLayout
    scoring: Scoring
    device: Device
    seconds: float
    max_pool: int
    seed: int


def working(
    names: Sequence[str], layout: KVLayout, device: torch.device
) -> tuple[dict[str, AttentionBackend], dict[str, str]]:
    """The backends that work here by name, and why the others do not."""
    backends: dict[str, AttentionBackend] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            backends[name] = create_backend(name, layout, device)
        except KVFerryError as error:
            missing[name] = error.message
    return backends, missing


def layers_for(case: AttentionCase, layout: KVLayout, max_pool: int) -> int:
    """Layers of the case's pool.

    Raises:
        ConfigError: not even one fits; names the case and both sizes.
    """
    needed = layout.pool_bytes(blocks_of(case, layout.block_size))
    if needed > max_pool:
        raise ConfigError(
            f"{case}: one layer takes {needed >> 20} MiB, more than --max-pool allows ({max_pool >> 20} MiB)",
            field="max_pool",
        )
    return min(MAX_LAYERS, max_pool // needed)


@dataclass(slots=True)
class _Times:
    """Of one backend in one case, round by round."""

    layer: list[float] = field(default_factory=list)
    plan: list[float] = field(default_factory=list)


@torch.inference_mode()
def measure_case(
    case: AttentionCase,
    scene: Scene,
    backends: Mapping[str, AttentionBackend],
    missing: Mapping[str, str],
    on_round: OnRound,
) -> tuple[AttentionOutcome, Rates]:
    """Measure one case.

    Returns:
        What came of it, and the device's rates in it.
    """
    layers = layers_for(case, scene.layout, scene.max_pool)
    dtype = TORCH_DTYPES[scene.layout.dtype]
    work = work_of(case, scene.shape, dtype.itemsize, scene.scoring.window)
    layout = msgspec.structs.replace(scene.layout, num_layers=layers)
    step = Step(case, scene.shape, layout, scene.device.device, scene.scoring, scene.seed)
    skipped = dict(missing)
    taking = dict(backends)
    if "reference" in taking and case.batch * case.queries * scene.shape.heads > REFERENCE_ROWS:
        del taking["reference"]
        skipped["reference"] = "computes query by query, and is left out of larger steps"
    errors = {name: step.error(step.plan(backend)) for name, backend in taking.items()}
    times = {name: _Times() for name in taking}
    rates: list[Rates] = []
    order = random.Random(scene.seed)  # noqa: S311
    turns = list(taking.items())
    began = time.monotonic()
    while len(rates) < MIN_ROUNDS or time.monotonic() - began < scene.seconds:
        reads = [scene.device.read()]
        # Whoever reads what was read a moment ago finds it in a cache: nobody does.
        order.shuffle(turns)
        for name, backend in turns:
            _one_round(step, backend, scene.device, layers, times[name], reads)
        rates.append(Rates(statistics.median(reads), scene.device.multiply()))
        on_round(min(1.0, (time.monotonic() - began) / scene.seconds))
    floors = [floor(work, rate)[0] for rate in rates]
    typical = Rates(*(statistics.median(values) for values in zip(*rates, strict=True)))
    figures = [
        *(_figure(name, times[name], floors, errors[name], ROUNDING[dtype]) for name in taking),
        *(EntryFigure(entry=name, state="skipped", reason=reason) for name, reason in skipped.items()),
    ]
    return AttentionOutcome(
        case=case,
        layers=layers,
        rounds=len(rates),
        nbytes=work.nbytes,
        flops=work.flops,
        floor_seconds=statistics.median(floors),
        bound=floor(work, typical)[1],
        figures=tuple(figures),
    ), typical


def _one_round(
    step: Step, backend: AttentionBackend, device: Device, layers: int, times: _Times, reads: list[float]
) -> None:
    reads.append(device.read())
    planning = device.seconds(lambda: step.plan(backend))
    plan = step.plan(backend)
    reads.append(device.read())
    layer = device.seconds(lambda: step.run(plan)) / layers
    times.layer.append(layer)
    # A plan's own cost is what its first layer takes longer.
    times.plan.append(max(0.0, planning - layer))


def _figure(name: str, times: _Times, floors: Sequence[float], error: float, rounding: float) -> EntryFigure:
    return EntryFigure(
        entry=name,
        state="measured" if error <= rounding else "wrong",
        seconds=statistics.median(times.layer),
        plan_seconds=statistics.median(times.plan),
        fraction=paired_ratio(times.layer, floors),
        error=error,
    )
