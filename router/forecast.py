"""What one request would take on each worker: pure arithmetic over the fleet's columns.

A decision is some tens of operations over arrays, and for a few workers each costs the same: what depends on workers
alone is in the fleet's columns already.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from router.fleet import Fleet, Floats, Rows

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
        transfer: until they have crossed its own link, what is ahead of them there included.
        running: sequences that are there or on their way.
        tpot: per output token.
        wait: for room.
        speed: share of its speed that a worker is trusted with; for who chooses, it is no part of the times.
        settled: whether that is all of it for each.
        now: when this is predicted.
    """

    queue: Floats
    uncached: Floats
    ttft: Floats
    compute: Floats
    missing: Floats
    transfer: Floats
    running: Floats
    tpot: Floats
    wait: Floats
    speed: Floats
    settled: bool
    now: float


def forecast(fleet: Fleet, length: int, cached: Floats, now: float, slow_start: float) -> Forecast:
    """For a prompt of ``length`` tokens, of which each worker has ``cached``."""
    missing = length - cached
    uncached = missing
    # The last token's logits are always computed.
    if not missing.all():
        uncached = np.where(missing > 0.0, missing, np.minimum(fleet.block_size, length))
    compute = uncached * fleet.pace
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
        ttft=(left + compute + fleet.fixed) * fleet.correction * fleet.common["prefill"].at(now),
        compute=compute,
        missing=missing,
        transfer=missing * fleet.links.token_bytes * fleet.links.pace + np.maximum(fleet.links.until - now, 0.0),
        running=fleet.sequences.copy(),
        tpot=fleet.step * fleet.correction * fleet.common["decode"].at(now),
        wait=np.where(fleet.room < missing, ROOM_WAIT, 0.0),
        speed=speed,
        settled=settled,
        now=now,
    )


def lateness(fleet: Fleet, told: Forecast, rows: Rows, partners: Rows) -> Floats | None:
    """Seconds by which a prompt's last block comes to a decode worker after the prompt is computed.

    Args:
        fleet: of the workers.
        told: of the prompt.
        rows: of prefill workers.
        partners: of decode workers; a row each of what is returned. None where nothing is late for certain.
    """
    links = fleet.links
    ahead = np.maximum(np.maximum(links.until[partners][:, None], links.until[rows]) - told.now, 0.0)
    computes = told.compute[rows]
    if links.most(partners, told.missing, told.now) + float(ahead.max()) <= float(computes.min()):
        return None
    alone = (told.missing * links.token_bytes)[partners][:, None] * links.paces(partners, rows, told.now)
    # Blocks go while they are computed, and the links get on while the prompt waits.
    late: Floats = np.maximum(np.maximum(alone - computes, ahead + alone - told.ttft[rows]), 0.0)
    return late


@dataclass(frozen=True, slots=True)
class Crossing:
    """What the blocks of a prompt take from one prefill worker to one decode worker; in seconds.

    Attributes:
        alone: of their bytes over the links of both.
        ahead: until these have carried what was sent before.
        late: by which the last of them comes after the prompt is computed.
    """

    alone: float
    ahead: float
    late: float


def crossing(fleet: Fleet, told: Forecast, row: int, partner: int) -> Crossing:
    """From the prefill worker ``row`` to the decode worker ``partner``."""
    links = fleet.links
    alone = float(told.missing[partner] * links.token_bytes[partner]) * links.pair(row, partner, told.now)
    ahead = links.ahead(row, partner, told.now)
    late = max(alone - float(told.compute[row]), ahead + alone - float(told.ttft[row]), 0.0)
    return Crossing(alone, ahead, late)


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
        ttft=(tokens * fleet.beside + steps * fleet.step) * fleet.common["local"].at(told.now),
        beside=told.running * told.uncached * fleet.beside,
    )
