"""Runs the benchmark of engines, case by case; ours, the rivals and the device's limits take turns within a case."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.bench.engine.case import EngineCase
from cluster.bench.engine.figures import OURS, EngineFigure, EngineOutcome
from cluster.bench.engine.ours import Ours
from cluster.bench.engine.rivals import Rival
from cluster.bench.rivals.contest import OnRival, RivalState
from cluster.bench.roofline import Device, Rates, Work, floor
from cluster.bench.statistics import paired_ratio
from protocol.errors import ConnectionFailed

MIN_ROUNDS = 5

OnRound = Callable[[float], None]
"""Called with the share of a case that is done."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long a case is measured.

    Attributes:
        steps: of a decode, in each round.
        seconds: rounds begin for so long, and there are at least :data:`MIN_ROUNDS`.
        seed: of the turns' order.
    """

    steps: int
    seconds: float
    seed: int


async def measure_case(
    case: EngineCase,
    work: Work,
    ours: Ours,
    rivals: list[Rival],
    device: Device,
    effort: Effort,
    on_round: OnRound,
    on_rival: OnRival,
) -> tuple[EngineOutcome, Rates]:
    """Measure one case; a rival that fails is taken from ``rivals``, and ``on_rival`` is told.

    Returns:
        What came of it, and the device's rates in it.

    Raises:
        PoolExhausted, EngineFailure: ours failed.
    """
    times: dict[str, list[float]] = {}
    rates: list[Rates] = []
    order = random.Random(effort.seed)  # noqa: S311
    # The first round does not count.
    await _round(case, ours, rivals, {}, device, effort.steps, order, on_rival)
    began = time.monotonic()
    while len(rates) < MIN_ROUNDS or time.monotonic() - began < effort.seconds:
        reads = await _round(case, ours, rivals, times, device, effort.steps, order, on_rival)
        rates.append(Rates(statistics.median(reads), await ours.call(device.multiply)))
        on_round(min(1.0, (time.monotonic() - began) / effort.seconds, len(rates) / MIN_ROUNDS))
    floors = [floor(work, rate)[0] for rate in rates]
    typical = Rates(*(statistics.median(values) for values in zip(*rates, strict=True)))
    tokens = case.batch * (1 if case.kind == "decode" else case.context)
    figures = [
        EngineFigure(
            engine=name,
            seconds=statistics.median(times[name]),
            tokens_per_s=tokens / statistics.median(times[name]),
            fraction=paired_ratio(times[name], floors),
            ratio=paired_ratio(times[OURS], times[name]),
        )
        for name in (OURS, *(rival.name for rival in rivals))
    ]
    return EngineOutcome(
        case=case,
        rounds=len(rates),
        nbytes=work.nbytes,
        flops=work.flops,
        floor_seconds=statistics.median(floors),
        bound=floor(work, typical)[1],
        figures=tuple(figures),
    ), typical


async def _round(
    case: EngineCase,
    ours: Ours,
    rivals: list[Rival],
    times: dict[str, list[float]],
    device: Device,
    steps: int,
    order: random.Random,
    on_rival: OnRival,
) -> list[float]:
    """One turn of each, in a new order; the device's speed at reading, as it was around them."""
    reads = [await ours.call(device.read)]
    turns: list[Ours | Rival] = [ours, *rivals]
    order.shuffle(turns)
    for entrant in turns:
        try:
            seconds = await entrant.turn(case, steps)
        except ConnectionFailed as error:
            assert isinstance(entrant, Rival), "ours is in this process"
            rivals.remove(entrant)
            on_rival(RivalState(rival=entrant.name, reason=f"{case}: {error.message}"))
        else:
            times.setdefault(entrant.name, []).append(statistics.fmean(seconds))
        reads.append(await ours.call(device.read))
    return reads
