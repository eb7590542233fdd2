"""Choosing a prefill and a decode worker for one attempt: pure functions of a snapshot.

A policy gives each worker of either role a cost; :func:`place` takes the pair that costs least among those that fit
together. A new policy is one function and one line in ``POLICIES``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

import numpy as np

from protocol.errors import NoWorkerAvailable
from protocol.ids import Peer
from router.columns import Bools, Floats, Rows
from router.fleet import Fleet
from router.forecast import HORIZON, Forecast, lateness
from router.pair import cheapest
from router.pairing import unpaired
from router.registry import Worker

DEFAULT = "cost"
CANDIDATES = 16
"""Workers of each role that pairs are made of, the cheapest; all of them where no pair of these fits."""
AVOIDED = 1e12
"""What an excluded worker costs more than any other."""
BARRED = 10 * AVOIDED
"""The same of one whose breaker is open."""
LINK_USE = 0.1
"""What a second of a link costs where nobody waits for it."""
SPREAD = 2.0
"""Mean prompts' times that a prefill worker costs more which was sent twice the mean lately."""
STRIDE = 7919
"""Turns between the beginnings of two routers; a prime, so that these differ among any number of equals."""
TOLERANCE = 5e-3
"""Share by which the default policy takes two costs for equal."""
LATE = 100.0
"""Seconds that a worker costs more which misses a target; one that meets it is taken if there is any."""
IMBALANCE_TOKENS, IMBALANCE_SEQUENCES = 4096, 8
"""More than the least loaded has, at which a worker gets nothing for its prefix alone."""


class Demand(NamedTuple):
    """What one attempt wants.

    Attributes:
        needs_decode: False when the request ends with prefill's token.
        excluded: peers to avoid where there are others.
        turn: grows by one for each placement; equal workers take turns by it.
        prompt_tokens: that are to be prefilled.
        output: tokens at most.
        session: whose requests go together; "" when that is not known.
        sequences: that one prefill comes to.
        ttft_target: seconds within which the first token is to come; 0 for no bound.
        barred: peers that get nothing while there are others, those to be avoided among them.
        reserve: tokens of prompt and answer that decode is expected to hold in the end; 0 where nobody reckons with it.
    """

    needs_decode: bool
    excluded: frozenset[Peer] = frozenset()
    turn: int = 0
    prompt_tokens: int = 0
    output: int = HORIZON
    session: str = ""
    sequences: int = 1
    ttft_target: float = 0.0
    barred: frozenset[Peer] = frozenset()
    reserve: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What there is to choose from, and what the request would take where; by row of the fleet."""

    fleet: Fleet
    forecast: Forecast


class Placement(NamedTuple):
    """Where one attempt runs; without ``decode``, prefill's token is the whole answer.

    ``local`` tells why a decode worker prefills, which is then both; it is "" where a prefill worker does.
    """

    prefill: Worker
    decode: Worker | None
    local: str = ""

    @property
    def peers(self) -> frozenset[Peer]:
        """Each worker once."""
        return frozenset(worker.peer for worker in (self.prefill, self.decode) if worker is not None)


@dataclass(frozen=True, slots=True)
class Ranking:
    """Costs by row, the lowest first.

    Attributes:
        prefill, decode: of the workers of either role.
        in_seconds: whether both are, so that they add up, with the time that blocks take to cross, where prefill does
            not hide it.
        tolerance: share of the less of a pair's two costs by which another may cost more and still be its equal: of
            the whole it would be a large part of a short prompt's time where outputs are long.
    """

    prefill: Floats
    decode: Floats
    in_seconds: bool = False
    tolerance: float = 0.0


Policy = Callable[[Snapshot, Demand], Ranking]


def round_robin(snapshot: Snapshot, demand: Demand) -> Ranking:
    """Each in its turn, whatever the load."""
    fleet = snapshot.fleet
    # Shifted by one whenever both are through together, so that every pair comes up, not only those of equal positions.
    rounds = demand.turn // max(1, math.lcm(len(fleet.able("prefill")), len(fleet.able("decode"))))
    return Ranking(_in_turn(fleet.prefill, demand.turn), _in_turn(fleet.decode, demand.turn + rounds))


def random(snapshot: Snapshot, demand: Demand) -> Ranking:
    """Anyone, whatever the load; drawn by the turn, so the same turn gives the same."""
    draws = _draws(snapshot.fleet, demand.turn)
    return Ranking(draws, draws)


def power_of_two(snapshot: Snapshot, demand: Demand) -> Ranking:
    """The less loaded of two that are drawn."""
    fleet = snapshot.fleet
    draws, loads = _draws(fleet, demand.turn), least_loaded(snapshot, demand)

    def of_two(able: Bools, load: Floats) -> Floats:
        drawn = np.where(able, draws, np.inf)
        second = np.partition(drawn, 1)[1]
        return np.where(drawn <= second, load, load + AVOIDED / 4)

    return Ranking(of_two(fleet.prefill, loads.prefill), of_two(fleet.decode, loads.decode))


def least_loaded(snapshot: Snapshot, demand: Demand) -> Ranking:
    """Fewest prompt tokens ahead (prefill) or fewest sequences (decode); equals take turns."""
    return Ranking(snapshot.forecast.queue, snapshot.forecast.running)


def prefix_aware(snapshot: Snapshot, demand: Demand) -> Ranking:
    """Who has most of the prompt, as long as it is not loaded much more than others; equals by load."""
    fleet, told = snapshot.fleet, snapshot.forecast
    loads = least_loaded(snapshot, demand)

    def of_prefix(able: Bools, load: Floats, lacks: Floats, bound: float) -> Floats:
        least = np.min(load, where=able, initial=np.inf)
        overloaded = load > least + bound
        return np.where(overloaded, AVOIDED / 4, lacks * 1e3) + load * 1e-3

    return Ranking(
        of_prefix(fleet.prefill, loads.prefill, told.uncached, IMBALANCE_TOKENS),
        of_prefix(fleet.decode, loads.decode, told.missing, IMBALANCE_SEQUENCES),
    )


def session_affinity(snapshot: Snapshot, demand: Demand) -> Ranking:
    """The same pair for a session as long as it lives, by rendezvous hashing; who has no session goes by load."""
    if not demand.session:
        return least_loaded(snapshot, demand)
    key = int.from_bytes(demand.session.encode()[:256], "little") % ((1 << 61) - 1)
    draws = _draws(snapshot.fleet, key)
    return Ranking(draws, draws)


def cost(snapshot: Snapshot, demand: Demand) -> Ranking:
    """The least predicted time: to the first token, for blocks to cross, and for the output after it."""
    told = snapshot.forecast
    tokens = min(demand.output, HORIZON)
    ttft, output = told.ttft, told.tpot * tokens
    if not told.settled:
        ttft, output = ttft / told.speed, output / told.speed
    if told.waits:
        ttft, output = ttft + told.wait, output + told.wait
    recent = snapshot.fleet.recent
    prefill = recent.excess(len(snapshot.fleet.able("prefill")))
    prefill *= SPREAD * recent.mean
    prefill += ttft
    if demand.ttft_target:
        prefill += np.where(told.ttft + told.wait > demand.ttft_target, LATE, 0.0)
    # Even where a transfer holds nobody up, others could have had the link.
    decode = LINK_USE * told.transfer
    decode += output
    return Ranking(prefill, decode, in_seconds=True, tolerance=TOLERANCE)


POLICIES: dict[str, Policy] = {
    DEFAULT: cost,
    "least_loaded": least_loaded,
    "power_of_two": power_of_two,
    "prefix_aware": prefix_aware,
    "random": random,
    "round_robin": round_robin,
    "session_affinity": session_affinity,
}
"""Every policy by name."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A pair of rows, and what they were chosen from.

    Attributes:
        prefill, decode: rows; no decode where none is needed.
        prefill_candidates, decode_candidates: rows that were looked at; none for decode where none is needed.
        ranking: of all.
        local: why the decode worker prefills, which is then both; "" where a prefill worker does.
    """

    prefill: int
    decode: int | None
    prefill_candidates: Rows
    decode_candidates: Rows | None
    ranking: Ranking
    local: str = ""


def place_alone(policy: str, snapshot: Snapshot, demand: Demand, rows: Rows, local: str) -> Choice:
    """The one of some decode workers that ``policy`` likes best, for prompt and output alike."""
    ranking = POLICIES[policy](snapshot, demand)
    avoided = penalties(snapshot.fleet, demand)
    chosen = _best(ranking.decode if avoided is None else ranking.decode + avoided, rows, ranking, demand)
    return Choice(chosen, chosen if demand.needs_decode else None, rows, rows, ranking, local)


def place(policy: str, snapshot: Snapshot, demand: Demand) -> Choice:
    """The pair that ``policy`` likes best among those that fit together.

    Raises:
        NoWorkerAvailable: there is none; says which role is missing.
    """
    fleet = snapshot.fleet
    if not fleet.able("prefill").size:
        raise NoWorkerAvailable("no prefill worker is available")
    if demand.needs_decode and not fleet.able("decode").size:
        raise NoWorkerAvailable("no decode worker is available")
    ranking = POLICIES[policy](snapshot, demand)
    avoided = penalties(fleet, demand)
    prefill = ranking.prefill if avoided is None else ranking.prefill + avoided
    decode = ranking.decode if avoided is None else ranking.decode + avoided
    if not demand.needs_decode:
        rows = _cheapest(prefill, fleet.able("prefill"), CANDIDATES)
        chosen = _best(prefill, rows, ranking, demand)
        return Choice(chosen, None, rows, None, ranking)
    for bound in (CANDIDATES, len(fleet)):
        rows = _cheapest(prefill, fleet.able("prefill"), bound)
        partners = _cheapest(decode, fleet.able("decode"), bound)
        if ranking.in_seconds:
            here, there = prefill[rows], decode[partners]
            late = lateness(fleet, snapshot.forecast, rows, partners)
            if late is None and bound == CANDIDATES:
                first, second = cheapest(here.tolist(), there.tolist(), None, ranking.tolerance, demand.turn)
                if fleet.fit(int(rows[first]), int(partners[second])):
                    return Choice(int(rows[first]), int(partners[second]), rows, partners, ranking)
            pairs = there[:, None] + here
            if late is not None:
                pairs += late
            slack = ranking.tolerance * min(float(here.min()), float(there.min()))
        else:
            # Costs of different kinds: the prefill worker's counts first.
            pairs = _ranks(decode[partners])[:, None] + _ranks(prefill[rows]) * len(fleet)
            slack = 0.0
        pair = _fitting(fleet, pairs, rows, partners, slack, demand.turn)
        if pair is not None:
            return Choice(*pair, rows, partners, ranking)
    first, second = fleet.workers[rows[prefill[rows].argmin()]], fleet.workers[partners[decode[partners].argmin()]]
    assert first is not None
    assert second is not None
    raise NoWorkerAvailable(
        f"no prefill worker has a decode worker that it can ship to; {first.peer.name} (here) and "
        f"{second.peer.name} (there): {unpaired(first, second)}"
    )


def first_turn(router: str) -> int:
    """Where the turns of a router's requests begin: several that were in step would all take the same of equals."""
    number = router.rpartition("-")[2]
    return STRIDE * (int(number) if number.isdecimal() else crc32(router.encode()))


def _best(costs: Floats, rows: Rows, ranking: Ranking, demand: Demand) -> int:
    """The cheapest of the rows; among equals, the turn decides."""
    found = costs[rows]
    near = np.flatnonzero(found <= found.min() * (1 + ranking.tolerance))
    return int(rows[near[demand.turn % len(near)]])


def _fitting(
    fleet: Fleet, pairs: Floats, rows: Rows, partners: Rows, slack: float, turn: int
) -> tuple[int, int] | None:
    """The cheapest pair that fits together; among equals, which ``slack`` makes, the turn decides."""
    flat = pairs.reshape(-1)
    while True:
        least = flat.min()
        if least == np.inf:
            return None
        near = np.flatnonzero(flat <= least + slack)
        chosen = int(near[turn % len(near)])
        prefill, decode = int(rows[chosen % len(rows)]), int(partners[chosen // len(rows)])
        if fleet.fit(prefill, decode):
            return prefill, decode
        flat[chosen] = np.inf


def _ranks(costs: Floats) -> Floats:
    return np.unique(costs, return_inverse=True)[1].astype(np.float64)


def _cheapest(costs: Floats, rows: Rows, bound: int) -> Rows:
    """At most ``bound`` of the rows, none of the others costing less; in their own order."""
    if len(rows) <= bound:
        return rows
    return rows[np.sort(np.argpartition(costs[rows], bound)[:bound])]


def penalties(fleet: Fleet, demand: Demand) -> Floats | None:
    """By row, what those cost more that are to be avoided; None where there are none."""
    if not demand.excluded and not demand.barred:
        return None
    extra = np.zeros(len(fleet))
    for peers, more in ((demand.excluded, AVOIDED), (demand.barred, BARRED)):
        extra[[row for row in map(fleet.find, peers) if row is not None]] += more
    return extra


def _in_turn(able: Bools, turn: int) -> Floats:
    position = np.cumsum(able) - 1
    return ((position - turn) % max(1, int(able.sum()))).astype(np.float64)


def _draws(fleet: Fleet, key: int) -> Floats:
    """A number in [0, 1) for each worker, by its name and ``key`` alone (splitmix64)."""
    mixed = fleet.seeds ^ np.uint64(key * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) / np.float64(1 << 64)
