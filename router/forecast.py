"""What one request would take on each worker: pure arithmetic over the fleet's columns.

A decision is some tens of operations over arrays, of which each costs about the same for ten workers and for a
thousand: what depends on workers alone is in the columns already, and what adds nothing is left out. Where there are
few, :mod:`router.glance` comes to the same without arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from router.columns import Floats, Rows
from router.fleet import Fleet
from router.links import Links

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
        transfer: until they have crossed its own link, what is ahead of them there included.
        running: sequences that are there or on their way.
        tpot: per output token.
        wait: for room.
        speed: share of its speed that a worker is trusted with; for who chooses, it is no part of the times.
        settled: whether that is all of it for each.
        waits: whether anyone is to be waited for.
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
    waits: bool
    now: float


def forecast(fleet: Fleet, length: int, cached: Floats, now: float, slow_start: float) -> Forecast:
    """For a prompt of ``length`` tokens, of which each worker has ``cached``."""
    columns = fleet.columns
    missing = length - cached
    uncached = missing
    # The last token's logits are always computed.
    if not missing.all():
        uncached = np.where(missing > 0.0, missing, np.minimum(columns.block_size, length))
    compute = uncached * columns.pace
    ttft = columns.backlog - np.minimum(now - columns.since, columns.head)
    ttft += compute
    # A step that is not full takes its fixed part all the same.
    ttft += columns.fixed
    ttft *= columns.correction
    ttft *= fleet.common["prefill"].at(now)
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
        transfer=missing * fleet.links.token_bytes * fleet.links.pace + np.maximum(fleet.links.until - now, 0.0),
        running=columns.sequences,
        tpot=columns.step * columns.correction * fleet.common["decode"].at(now),
        wait=wait,
        speed=speed,
        settled=settled,
        waits=waits,
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
    links, now = fleet.links, told.now
    nbytes, computes = told.missing[partners] * links.token_bytes[partners], told.compute[rows]
    if links.in_time(float(nbytes.max()), float(computes.min()), now):
        return None
    return late_pairs(links, nbytes, computes, told.ttft[rows], rows, partners, now)


def late_pairs(
    links: Links, nbytes: Floats, computes: Floats, ttft: Floats, rows: Rows, partners: Rows, now: float
) -> Floats:
    """The same by the bytes that each of ``partners`` lacks, and the times of each of ``rows``."""
    ahead = np.maximum(np.maximum(links.until[partners][:, None], links.until[rows]) - now, 0.0)
    alone = nbytes[:, None] * links.paces(partners, rows, now)
    # Blocks go while they are computed, and the links get on while the prompt waits.
    late: Floats = np.maximum(np.maximum(alone - computes, ahead + alone - ttft), 0.0)
    return late


class Crossing(NamedTuple):
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
    missing, computes, ttft = float(told.missing[partner]), float(told.compute[row]), float(told.ttft[row])
    return cross(fleet.links, missing, computes, ttft, row, partner, told.now)


def cross(links: Links, missing: float, computes: float, ttft: float, row: int, partner: int, now: float) -> Crossing:
    """The same where ``partner`` lacks so many tokens, by the times of ``row``."""
    alone = missing * links.ends[partner].token_bytes * links.pair(row, partner, now)
    ahead = links.ahead(row, partner, now)
    return Crossing(alone, ahead, max(alone - computes, ahead + alone - ttft, 0.0))


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
        ttft=(tokens * columns.beside + steps * columns.step) * fleet.common["local"].at(told.now),
        beside=told.running * told.uncached * columns.beside,
    )
