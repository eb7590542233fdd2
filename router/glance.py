"""The default policy's choice where there are few workers, in plain numbers: the very one that arrays would give.

For some ten workers of a role an operation over arrays takes as long as all of theirs one by one. What is computed here
is what :func:`~router.forecast.forecast`, :func:`~router.policy.cost` and :func:`~router.policy.place` say, in the same
order, so that the last bit is the same; a test holds them against each other.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from router.bid import Bid
from router.explanations import DECODE_FIELDS, PREFILL_FIELDS, Candidates
from router.fleet import Fleet
from router.forecast import HORIZON, ROOM_WAIT, SLOWEST, cross, late_pairs
from router.pair import cheapest
from router.policy import CANDIDATES, LATE, LINK_USE, SPREAD, TOLERANCE, Demand

Numbers = tuple[float, ...]


def glance(
    fleet: Fleet, length: int, cached: Mapping[int, int], demand: Demand, now: float, slow_start: float
) -> tuple[Bid, float] | None:
    """The choice for a prompt of ``length`` tokens, of which workers have ``cached`` by row; None where it is not ours.

    It is not where there are many workers, none of a role, some to be avoided, or some that do not fit together.

    Returns:
        It, and in how many seconds a first token is predicted at the earliest, which is told where there is a target.
    """
    rows, partners = fleet.takers("prefill"), fleet.takers("decode")
    if demand.excluded or demand.barred or not 0 < len(rows) <= CANDIDATES or not 0 < len(partners) <= CANDIDATES:
        return None
    start = None if now - fleet.newest >= slow_start else slow_start
    here, compute, soonest = _prefill(fleet, rows, length, cached, demand, now, start)
    costs = [numbers[-1] for numbers in here]
    seen = Candidates(fleet.names, rows, PREFILL_FIELDS, here)
    if not demand.needs_decode:
        bound = min(costs) * (1 + TOLERANCE)
        near = [place for place, each in enumerate(costs) if each <= bound]
        first = near[demand.turn % len(near)]
        _, uncached, ttft, *_ = here[first]
        return Bid(rows[first], None, "", uncached, ttft, None, None, seen, None), soonest
    there, nbytes = _decode(fleet, partners, length, cached, demand, now, start)
    late = _late(fleet, here, compute, nbytes, now)
    first, second = cheapest(costs, [numbers[-1] for numbers in there], late, TOLERANCE, demand.turn)
    prefill, decode = rows[first], partners[second]
    if not fleet.fit(prefill, decode):
        return None
    _, uncached, ttft, *_ = here[first]
    _, missing, _, tpot, *_ = there[second]
    blocks = cross(fleet.links, missing, compute[first], ttft, prefill, decode, now)
    others = Candidates(fleet.names, partners, DECODE_FIELDS, there)
    return Bid(prefill, decode, "", uncached, ttft, tpot, blocks, seen, others), soonest


def _late(
    fleet: Fleet, here: list[Numbers], compute: list[float], nbytes: list[float], now: float
) -> list[list[float]] | None:
    """See :func:`~router.forecast.lateness`; of all workers."""
    links = fleet.links
    if links.in_time(max(nbytes), min(compute), now):
        return None
    rows, partners = fleet.able("prefill"), fleet.able("decode")
    times = np.array(compute), np.array([numbers[2] for numbers in here])
    late: list[list[float]] = late_pairs(links, np.array(nbytes), *times, rows, partners, now).tolist()
    return late


def _prefill(
    fleet: Fleet,
    rows: list[int],
    length: int,
    cached: Mapping[int, int],
    demand: Demand,
    now: float,
    start: float | None,
) -> tuple[list[Numbers], list[float], float]:
    """What each is judged by, the part of its time that computes this prompt, and the earliest first token of all."""
    lanes, common, target = fleet.lanes, fleet.common["prefill"].at(now), demand.ttft_target
    weight = SPREAD * fleet.recent.mean
    found: list[Numbers] = []
    compute: list[float] = []
    soonest = float("inf")
    for row, excess in zip(rows, fleet.recent.excesses(rows), strict=True):
        lane = lanes[row]
        missing = float(length - cached.get(row, 0))
        uncached = missing if missing > 0.0 else min(lane.block_size, length)
        part = uncached * lane.pace
        passed, head = now - lane.since, lane.head
        ttft = (lane.backlog - (passed if passed < head else head) + part + lane.fixed) * lane.correction * common
        speed = 1.0 if start is None else min(max((now - lane.joined) / start, SLOWEST), 1.0)
        wait = ROOM_WAIT if lane.room < missing else 0.0
        price = ttft / speed + wait + excess * weight
        if target:
            if ttft + wait > target:
                price += LATE
            # Who has nothing to do is judged by its pace alone: were all refused for a correction, nothing would put
            # it right.
            soonest = min(soonest, (min(ttft, lane.fixed + part) if lane.ahead < 1.0 else ttft) + wait)
        compute.append(part)
        found.append((lane.ahead, uncached, ttft, wait, speed, price))
    return found, compute, soonest


def _decode(
    fleet: Fleet,
    rows: list[int],
    length: int,
    cached: Mapping[int, int],
    demand: Demand,
    now: float,
    start: float | None,
) -> tuple[list[Numbers], list[float]]:
    """What each is judged by, and the bytes of the blocks that it lacks."""
    lanes, ends, tokens = fleet.lanes, fleet.links.ends, min(demand.output, HORIZON)
    common = fleet.common["decode"].at(now)
    found: list[Numbers] = []
    nbytes: list[float] = []
    for row in rows:
        lane, end = lanes[row], ends[row]
        missing = float(length - cached.get(row, 0))
        lacking = missing * end.token_bytes
        ahead = end.until - now
        transfer = lacking * end.pace + (ahead if ahead > 0.0 else 0.0)
        tpot = lane.step * lane.correction * common
        speed = 1.0 if start is None else min(max((now - lane.joined) / start, SLOWEST), 1.0)
        wait = ROOM_WAIT if lane.room < missing else 0.0
        price = tpot * tokens / speed + wait + LINK_USE * transfer
        nbytes.append(lacking)
        found.append((lane.sequences, missing, transfer, tpot, wait, speed, price))
    return found, nbytes
