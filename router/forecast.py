"""What one request would take on each worker: pure arithmetic over the fleet's columns.

A decision is some tens of operations over arrays, of which each costs about the same for ten workers and for a
thousand: what depends on workers alone is in the columns already, and what adds nothing is left out. Where there are
few, :mod:`router.glance` comes to the same without arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from router.columns import Floats
from router.fleet import Fleet

SLOWEST = 0.1
"""Share of its speed that a worker which has just joined is trusted with; the rest comes with time."""
ROOM_WAIT = 1.0
"""Seconds that a request is taken to wait where the pool has no room for it."""
HORIZON = 64
"""Output tokens that are reckoned with at most: long answers seldom are as long as they may be."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """By row of the fleet, in seconds unless it says otherwise; of rows of the other role it means nothing.

    Good until the fleet's next event: some are its columns themselves.

    Attributes:
        queue: prompt tokens ahead.
        uncached: tokens of the prompt that would be computed there.
        ttft: to the first token.
        compute: part of that in which this prompt is computed, and its blocks cross.
        missing: tokens whose KV would have to cross.
        crossing: of their bytes over its link.
        transfer: until they have crossed, what is ahead of them on that link included.
        running: sequences that are there or on their way.
        tpot: per output token.
        wait: for room.
        speed: share of its speed that a worker is trusted with; for who chooses, it is no part of the times.
        settled: whether that is all of it for each.
        waits: whether anyone is to be waited for.
    """

    queue: Floats
    uncached: Floats
    ttft: Floats
    compute: Floats
    missing: Floats
    crossing: Floats
    transfer: Floats
    running: Floats
    tpot: Floats
    wait: Floats
    speed: Floats
    settled: bool
    waits: bool


def forecast(fleet: Fleet, length: int, cached: Floats, now: float, slow_start: float) -> Forecast:
    """For a prompt of ``length`` tokens, of which each worker has ``cached``."""
    columns = fleet.columns
    missing = length - cached
    uncached = missing
    # The last token's logits are always computed.
    if not missing.all():
        uncached = np.where(missing > 0.0, missing, np.minimum(columns.block_size, length))
    compute = uncached * columns.pace
    crossing = missing * columns.crossing
    ttft = columns.backlog - np.minimum(now - columns.since, columns.head)
    ttft += compute
    # A step that is not full takes its fixed part all the same.
    ttft += columns.fixed
    ttft *= columns.correction
    ttft *= fleet.common["prefill"]
    short = columns.room < missing
    waits = bool(short.any())
    wait, speed = np.where(short, ROOM_WAIT, 0.0) if waits else columns.zeros, columns.ones
    settled = now - fleet.newest >= slow_start
    if not settled:
        speed = np.minimum(np.maximum((now - columns.joined) / slow_start, SLOWEST), 1.0)
    return Forecast(
        queue=columns.ahead,
        uncached=uncached,
        ttft=ttft,
        compute=compute,
        missing=missing,
        crossing=crossing,
        transfer=crossing + np.maximum(columns.link_until - now, 0.0) if fleet.link_busy > now else crossing,
        running=columns.sequences,
        tpot=columns.step * columns.correction * fleet.common["decode"],
        wait=wait,
        speed=speed,
        settled=settled,
        waits=waits,
    )


@dataclass(frozen=True, slots=True)
class LocalForecast:
    """The same of decode workers that compute the prompt themselves, in shares of their steps; in seconds.

    Attributes:
        ttft: to the first token.
        beside: by which the sequences that are there are held up, all together.
    """

    ttft: Floats
    beside: Floats


def forecast_local(fleet: Fleet, told: Forecast) -> LocalForecast:
    """For the prompt that ``told`` is of."""
    columns = fleet.columns
    tokens = told.queue + told.uncached
    steps = np.ceil(tokens / columns.step_tokens)
    return LocalForecast(
        ttft=(tokens * columns.beside + steps * columns.step) * fleet.common["local"],
        beside=told.running * told.uncached * columns.beside,
    )
