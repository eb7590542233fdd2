"""What one request would take on each worker: pure arithmetic over the fleet's columns."""

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
        transfer: for them to cross.
        tpot: per output token.
        wait: for room.
        speed: share of its speed that a worker is trusted with; for who chooses, it is no part of the times.
    """

    queue: Floats
    uncached: Floats
    ttft: Floats
    compute: Floats
    missing: Floats
    transfer: Floats
    tpot: Floats
    wait: Floats
    speed: Floats


def forecast(fleet: Fleet, length: int, cached: Floats, now: float, slow_start: float) -> Forecast:
    """For a prompt of ``length`` tokens, of which each worker has ``cached``."""
    queue = np.maximum(fleet.waiting + fleet.own_tokens, 0.0)
    correction = fleet.corrections(now)
    # The last token's logits are always computed.
    hit = np.minimum(cached, (max(length - 1, 0) // fleet.block_size) * fleet.block_size)
    uncached, missing = length - hit, length - cached
    if now - fleet.newest >= slow_start:
        speed = np.ones(len(fleet))
    else:
        speed = np.minimum(np.maximum((now - fleet.joined) / slow_start, SLOWEST), 1.0)
    return Forecast(
        queue=queue,
        uncached=uncached,
        # A step that is not full takes its fixed part all the same.
        ttft=correction * (fleet.fixed + (queue + uncached) * fleet.in_full_steps),
        compute=uncached * fleet.in_full_steps,
        missing=missing,
        transfer=missing * fleet.crossing,
        tpot=correction * (fleet.fixed + fleet.per_token * (fleet.running + fleet.own_sequences + 1.0)),
        wait=np.where(fleet.room < missing, ROOM_WAIT, 0.0),
        speed=speed,
    )
