"""A choice and what was predicted of it, in plain numbers: what a decision is written from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from router.columns import Floats, Rows
from router.explanations import DECODE_FIELDS, PREFILL_FIELDS, Candidates
from router.forecast import Crossing, crossing, forecast_local
from router.policy import Choice, Snapshot


class Bid(NamedTuple):
    """Where a request goes, and what it would take there; times in seconds.

    Attributes:
        prefill, decode: rows; no decode where none is needed.
        local: why the decode worker prefills, which is then both; "" where a prefill worker does.
        uncached: tokens that would be computed.
        ttft, tpot: as predicted; without decode there is but the first.
        blocks: what those that decode lacks take; None where none cross.
        prefill_candidates, decode_candidates: who was looked at; None where nobody wants to know.
    """

    prefill: int
    decode: int | None
    local: str
    uncached: float
    ttft: float
    tpot: float | None
    blocks: Crossing | None
    prefill_candidates: Candidates | None
    decode_candidates: Candidates | None


def bid_of(snapshot: Snapshot, choice: Choice, *, explained: bool) -> Bid:
    """What was chosen of a snapshot; ``explained`` where it is to be kept who was looked at."""
    fleet, told, ranking = snapshot.fleet, snapshot.forecast, choice.ranking
    prefill, decode = choice.prefill, choice.decode
    ttft = forecast_local(fleet, told).ttft if choice.local else told.ttft
    here = there = None
    if explained:
        here = _candidates(
            fleet.names,
            choice.prefill_candidates,
            PREFILL_FIELDS,
            *(told.queue, told.uncached, ttft, told.wait, told.speed, ranking.prefill),
        )
    if explained and choice.decode_candidates is not None:
        there = _candidates(
            fleet.names,
            choice.decode_candidates,
            DECODE_FIELDS,
            *(told.running, told.missing, told.transfer, told.tpot, told.wait, told.speed, ranking.decode),
        )
    return Bid(
        prefill,
        decode,
        choice.local,
        float(told.uncached[prefill]),
        float(ttft[prefill]),
        None if decode is None else float(told.tpot[decode]),
        None if decode is None or decode == prefill else crossing(fleet, told, prefill, decode),
        here,
        there,
    )


def soonest(snapshot: Snapshot, choice: Choice) -> float:
    """Seconds in which a first token is predicted at the earliest."""
    fleet, told = snapshot.fleet, snapshot.forecast
    if choice.local:
        return float(forecast_local(fleet, told).ttft[choice.prefill])
    # Who has nothing to do is judged by its pace alone: were all refused for a correction, nothing would put it right.
    alone = np.where(told.queue < 1.0, fleet.columns.fixed + told.compute, np.inf)
    return float((np.minimum(told.ttft, alone) + told.wait)[fleet.able("prefill")].min())


def _candidates(names: Sequence[str], rows: Rows, fields: Sequence[str], *columns: Floats) -> Candidates:
    # Of a large fleet only what is told of is kept, and as arrays: few of them are ever asked for.
    return Candidates(names, rows, fields, np.array([column[rows] for column in columns]).T)
