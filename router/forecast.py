"""What one request would take on each worker: pure arithmetic over the fleet's columns.

A decision is some tens of operations over arrays, and for a few workers each costs the same: what depends on workers
alone is in the fleet's columns already.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from router.fleet import Fleet, Floats

SLOWEST = 0.1
"""Share of its speed that a worker which has just joined is trusted with; the rest comes with time."""
ROOM_WAIT = 1.0
"""Seconds that a request is taken to wait where the pool has no room for it."""
HORIZON = 64
"""Output tokens that are reckoned with at most: long answers seldom are as long as they may be."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """By row of the fleet, in seconds unless it says otherwise; of rows of the other role it means nothing.

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


def forecast(fleet: Fleet, length: int, cached: Floats, now: float, slow_start: float) -> Forecast:
    """For a prompt of ``length`` tokens, of which each worker has ``cached``."""
    missing = length - cached
    uncached = missing
    # The last token's logits are always computed.
    if not missing.all():
        uncached = np.where(missing > 0.0, missing, np.minimum(fleet.block_size, length))
    compute = uncached * fleet.pace
    crossing = missing * fleet.crossing
    left = fleet.backlog - np.minimum(now - fleet.since, fleet.head)
    speed = np.ones(len(fleet))
    settled = now - fleet.newest >= slow_start
    if not settled:
        speed = np.minimum(np.maximum((now - fleet.joined) / slow_start, SLOWEST), 1.0)
    return Forecast(
        # Copies: these go on changing, and what a decision was made by does not.
        queue=fleet.ahead.copy(),
        uncached=uncached,
        # A step that is not full takes its fixed part all the same.
        ttft=(left + compute + fleet.fixed) * fleet.correction * fleet.common["prefill"],
        compute=compute,
        missing=missing,
        crossing=crossing,
        transfer=crossing + np.maximum(fleet.link_until - now, 0.0),
        running=fleet.sequences.copy(),
        tpot=fleet.step * fleet.correction * fleet.common["decode"],
        wait=np.where(fleet.room < missing, ROOM_WAIT, 0.0),
        speed=speed,
        settled=settled,
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
    tokens = told.queue + told.uncached
    steps = np.ceil(tokens / fleet.step_tokens)
    return LocalForecast(
        ttft=(tokens * fleet.beside + steps * fleet.step) * fleet.common["local"],
        beside=told.running * told.uncached * fleet.beside,
    )
