"""The default policy's formula, written out worker by worker and pair by pair, and the quicker ways to the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_facts import LAYOUT, beating, fleet_of, paced

from protocol.errors import NoWorkerAvailable
from protocol.layout import KVLayout
from router.bid import Bid, bid_of, soonest
from router.fleet import Fleet
from router.forecast import forecast
from router.glance import glance
from router.pair import cheapest
from router.policy import CANDIDATES, Demand, Snapshot, place
from router.registry import Worker

OTHER = KVLayout(num_layers=2, kv_heads=4, head_dim=8, block_size=4)
SLOW_START = 10.0


@dataclass(frozen=True)
class Case:
    """A fleet at one moment, and a request."""

    fleet: Fleet
    length: int
    cached: dict[int, int]
    demand: Demand
    now: float
    columns: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        columns = np.zeros(len(self.fleet))
        columns[list(self.cached)] = list(self.cached.values())
        object.__setattr__(self, "columns", columns)


@st.composite
def cases(draw: st.DrawFn, most: int = 6) -> Case:
    """Some of whose workers are alike, so that there are equals."""

    def one(name: str, role: str) -> Worker:
        return paced(
            name,
            role,  # type: ignore[arg-type]
            token=draw(st.sampled_from([1e-3, 1e-3, 3e-3])),
            layout=draw(st.sampled_from([LAYOUT, LAYOUT, LAYOUT, OTHER])),
            waiting_tokens=draw(st.sampled_from([0, 0, 70, 800])),
            running=draw(st.sampled_from([0, 2, 9])),
            free=draw(st.sampled_from([63, 63, 5])),
            kv_bytes=1 << 20,
            kv_seconds=draw(st.sampled_from([1e-3, 0.5, 20.0])),
        )

    roles = {role: draw(st.integers(1, most)) for role in ("prefill", "decode")}
    workers = [one(f"{role[0]}{number}", role) for role, count in roles.items() for number in range(count)]
    fleet = fleet_of(workers)
    fleet.see([*workers, *(one(f"late{role}", role) for role in roles if draw(st.booleans()))], 100.0)
    rows = st.integers(0, len(fleet.workers) - 1)
    for kind, row in draw(st.lists(st.tuples(st.integers(0, 4), rows), max_size=12)):
        worker = fleet.workers[row]
        assert worker is not None
        match kind:
            case 0:
                fleet.send_prompt(row, 30.0 + row, 64, 100.0 + row)
            case 1:
                fleet.send_sequences(row, 2)
            case 2:
                other = draw(rows)
                fleet.links.send(row, other, 0.7, 100.0)
                fleet.links.crossed(row, other, 1 << 24, 0.2, 100.3)
            case 3:
                fleet.correct(worker.peer, worker.profile.role, 1.7, 100.2)
            case 4:
                fleet.see_again(beating(worker, steps=10_001 + row, running=row), 100.5)
    length = draw(st.integers(1, 80))
    return Case(
        fleet,
        length,
        draw(st.dictionaries(rows, st.integers(1, length), max_size=4)),
        Demand(
            needs_decode=draw(st.booleans()),
            turn=draw(st.integers(0, 500)),
            output=draw(st.sampled_from([1, 8, 400])),
            ttft_target=draw(st.sampled_from([0.0, 0.05, 0.9, 50.0])),
        ),
        100.0 + draw(st.sampled_from([0.0, 0.6, 3.0, 50.0])),
    )


@dataclass
class Judged:
    """One worker."""

    row: int
    told: tuple[float, ...]
    compute: float = 0.0
    alone: float = 0.0

    @property
    def cost(self) -> float:
        return self.told[-1]


def prefill(case: Case) -> list[Judged]:
    fleet, length, now, found = case.fleet, case.length, case.now, []
    recent, rows = fleet.recent, fleet.able("prefill").tolist()
    shares = recent.excess(len(rows))
    for row in rows:
        lane = fleet.lanes[row]
        missing = length - float(case.cached.get(row, 0))
        uncached = missing or min(lane.block_size, length)
        left = lane.backlog - min(now - lane.since, lane.head)
        ttft = (left + uncached * lane.pace + lane.fixed) * lane.correction * fleet.common["prefill"].at(now)
        speed = min(max((now - lane.joined) / SLOW_START, 0.1), 1.0)
        wait = 1.0 if lane.room < missing else 0.0
        cost = ttft / speed + wait + float(shares[row]) * (2.0 * recent.mean)
        if case.demand.ttft_target and ttft + wait > case.demand.ttft_target:
            cost += 100.0
        alone = lane.fixed + uncached * lane.pace if lane.ahead < 1.0 else np.inf
        told = (lane.ahead, uncached, ttft, wait, speed, cost)
        found.append(Judged(row, told, uncached * lane.pace, min(ttft, alone) + wait))
    return found


def decode(case: Case) -> list[Judged]:
    fleet, now, found = case.fleet, case.now, []
    for row in fleet.able("decode").tolist():
        lane = fleet.lanes[row]
        missing = case.length - float(case.cached.get(row, 0))
        links = fleet.links
        transfer = missing * float(links.token_bytes[row]) * float(links.pace[row])
        transfer += max(float(links.until[row]) - now, 0.0)
        tpot = lane.step * lane.correction * fleet.common["decode"].at(now)
        speed = min(max((now - lane.joined) / SLOW_START, 0.1), 1.0)
        wait = 1.0 if lane.room < missing else 0.0
        cost = tpot * min(case.demand.output, 64) / speed + wait + 0.1 * transfer
        found.append(Judged(row, (lane.sequences, missing, transfer, tpot, wait, speed, cost)))
    return found


def late(case: Case, here: Judged, there: Judged) -> float:
    links, now = case.fleet.links, case.now
    (pace,) = links.paces(np.array([there.row]), np.array([here.row]), now)[0].tolist()
    alone = there.told[1] * float(links.token_bytes[there.row]) * pace
    return max(alone - here.compute, links.ahead(here.row, there.row, now) + alone - here.told[2], 0.0)


def straightforward(case: Case) -> tuple[Judged, Judged | None] | None:
    """Every pair's cost, the least of them, its equals, and whose turn it is; None where no two fit."""
    left, right, turn = prefill(case), decode(case), case.demand.turn
    if not case.demand.needs_decode:
        bound = min(each.cost for each in left) * (1 + 5e-3)
        equals = [each for each in left if each.cost <= bound]
        return equals[turn % len(equals)], None
    slack = 5e-3 * min(min(each.cost for each in left), min(each.cost for each in right))
    pairs = {
        (first, second): there.cost + here.cost + late(case, here, there)
        for (second, there), (first, here) in product(enumerate(right), enumerate(left))
    }
    while pairs:
        bound = min(pairs.values()) + slack
        near = [pair for pair, cost in pairs.items() if cost <= bound]
        first, second = near[turn % len(near)]
        if case.fleet.fit(left[first].row, right[second].row):
            return left[first], right[second]
        del pairs[first, second]
    return None


def check(bid: Bid, expected: tuple[Judged, Judged | None]) -> None:
    here, there = expected
    assert (bid.prefill, bid.uncached, bid.ttft) == (here.row, here.told[1], here.told[2])
    assert (bid.decode, bid.tpot) == ((None, None) if there is None else (there.row, there.told[3]))
    assert (bid.blocks is None) == (there is None)


@given(cases())
def test_a_glance_and_arrays_choose_and_foretell_to_the_bit_what_the_formula_does(case: Case) -> None:
    expected = straightforward(case)
    told = forecast(case.fleet, case.length, case.columns, case.now, SLOW_START)
    snapshot = Snapshot(case.fleet, told)
    seen = glance(case.fleet, case.length, case.cached, case.demand, case.now, SLOW_START)
    if expected is None:
        assert seen is None
        with pytest.raises(NoWorkerAvailable):
            place("cost", snapshot, case.demand)
        return
    choice = place("cost", snapshot, case.demand)
    by_arrays = bid_of(snapshot, choice, explained=True)
    check(by_arrays, expected)
    earliest = min(each.alone for each in prefill(case))
    assert soonest(snapshot, choice) == earliest
    if seen is None:
        return  # who was chosen first did not fit
    bid, at_the_earliest = seen
    check(bid, expected)
    assert not case.demand.ttft_target or at_the_earliest == earliest
    assert bid.blocks == by_arrays.blocks
    for quick, arrays in (
        (bid.prefill_candidates, by_arrays.prefill_candidates),
        (bid.decode_candidates, by_arrays.decode_candidates),
    ):
        assert (quick is None) == (arrays is None)
        assert quick is None or arrays is None or quick.told() == arrays.told()


COSTS = st.lists(st.sampled_from([1.0, 1.0, 1.002, 1.2, 7.0]) | st.floats(0.1, 10.0), min_size=1, max_size=CANDIDATES)


@given(COSTS, COSTS, st.integers(0, 1000), st.randoms(), st.booleans())
def test_the_cheapest_pair_is_found_without_looking_at_all(
    here: list[float],
    there: list[float],
    turn: int,
    rng,  # type: ignore[no-untyped-def]
    slow: bool,
) -> None:
    late = [[rng.choice([0.0, 0.0, 0.6, rng.random()]) for _ in here] for _ in there] if slow else None
    costs = [
        (part + cost) + (0.0 if late is None else late[second][first])
        for second, part in enumerate(there)
        for first, cost in enumerate(here)
    ]
    bound = min(costs) + 5e-3 * min(min(here), min(there))
    near = [place for place, cost in enumerate(costs) if cost <= bound]
    second, first = divmod(near[turn % len(near)], len(here))
    assert cheapest(here, there, late, 5e-3, turn) == (first, second)


def test_many_workers_some_to_be_avoided_and_a_role_without_any_are_left_to_arrays() -> None:
    def seen(prefill: int, decode: int, demand: Demand) -> bool:
        workers = [paced(f"p{number}", "prefill") for number in range(prefill)]
        fleet = fleet_of([*workers, *(paced(f"d{number}", "decode") for number in range(decode))])
        return glance(fleet, 10, {}, demand, 0.0, 0.0) is not None

    wish = Demand(needs_decode=True)
    assert seen(CANDIDATES, CANDIDATES, wish)
    assert not seen(CANDIDATES + 1, 1, wish)
    assert not seen(1, CANDIDATES + 1, wish)
    assert not seen(0, 1, wish)
    assert not seen(1, 0, wish)
    peer = paced("p0", "prefill").peer
    assert not seen(2, 2, Demand(needs_decode=True, excluded=frozenset({peer})))
    assert not seen(2, 2, Demand(needs_decode=True, barred=frozenset({peer})))
