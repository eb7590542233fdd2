"""What blocks are predicted to take: by what workers tell of their links, and by what was measured on them lately."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from worker_facts import LAYOUT, beating, fleet_of, paced

from protocol.messages import WorkerProfile
from router.fleet import Fleet
from router.forecast import crossing, forecast, lateness
from router.links import ASSUMED
from router.policy import Demand, Snapshot, place
from router.registry import Worker

TOKEN = LAYOUT.block_bytes / LAYOUT.block_size
GBIT = 1e9 / 8


def rate(fleet: Fleet, prefill: str = "p0", decode: str = "d0", now: float = 0.0) -> float:
    """Bytes a second that are reckoned with between two workers, the same for one pair as for a table of them."""
    row, partner = fleet.row(prefill), fleet.row(decode)
    pace = fleet.links.pair(row, partner, now)
    (table,) = fleet.links.paces(np.array([partner]), np.array([row]), now)
    assert table[0] == pytest.approx(pace, rel=1e-6)
    return 1.0 / pace


def hosts(here: float, there: float, **more: object) -> list[Worker]:
    return [
        paced("p0", "prefill", host="10.0.0.1", link_rate=here),
        paced("d0", "decode", host="10.0.0.2", link_rate=there, prefills=True, **more),
    ]


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [(GBIT, 10 * GBIT, GBIT), (10 * GBIT, GBIT, GBIT), (0.0, GBIT, GBIT), (GBIT, 0.0, GBIT), (0.0, 0.0, ASSUMED)],
)
def test_before_anything_crossed_the_slower_end_counts(here: float, there: float, expected: float) -> None:
    assert rate(fleet_of(hosts(here, there))) == pytest.approx(expected)


def test_between_workers_of_one_host_no_network_counts() -> None:
    near = paced("d1", "decode", host="10.0.0.1", link_rate=GBIT)
    fleet = fleet_of([*hosts(GBIT, GBIT), near])
    assert rate(fleet, decode="d0") == pytest.approx(GBIT)
    assert rate(fleet, decode="d1") == pytest.approx(ASSUMED)
    alone = fleet_of([paced("p0", "prefill", link_rate=GBIT), paced("d0", "decode", link_rate=GBIT)])
    assert alone.links.pace[alone.row("d0")] == pytest.approx(1.0 / ASSUMED), "all of them are on one"


def test_what_a_pair_measured_counts_for_it_alone_and_fades() -> None:
    other = paced("p1", "prefill", host="10.0.0.3", link_rate=10 * GBIT)
    fleet = fleet_of([*hosts(10 * GBIT, 10 * GBIT), other])
    row, partner = fleet.row("p0"), fleet.row("d0")
    for turn in range(1, 11):
        fleet.links.crossed(row, partner, int(GBIT / 10), 0.1, float(turn))
    assert rate(fleet, now=10.0) == pytest.approx(GBIT, rel=0.15)
    assert rate(fleet, "p1", now=10.0) == pytest.approx(10 * GBIT, rel=0.01)
    rates = [rate(fleet, now=now) for now in (10.0, 60.0, 120.0, 1000.0)]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(10 * GBIT, rel=0.01)
    fleet.links.forget(partner, 11.0)
    assert rate(fleet, now=11.0) == pytest.approx(10 * GBIT, rel=0.01), "another life of it"


def test_ships_at_the_same_time_share_the_link() -> None:
    """Four of a second each, all in the same second: four times as fast as each of them looks."""
    fleet = fleet_of(hosts(10 * GBIT, 10 * GBIT))
    row, partner = fleet.row("p0"), fleet.row("d0")
    fleet.links.crossed(row, partner, 1, 1e-9, 99.0)
    for _ in range(4):
        fleet.links.crossed(row, partner, int(GBIT), 1.0, 100.0)
    assert rate(fleet, now=100.0) == pytest.approx(4 * GBIT, rel=0.15)


def test_what_landed_there_from_whomever_counts_for_a_pair_that_has_not_shipped_yet() -> None:
    fleet = fleet_of(hosts(10 * GBIT, 10 * GBIT, kv_bytes=int(GBIT), kv_seconds=1.0))
    assert rate(fleet) == pytest.approx(GBIT, rel=0.1)
    prefill, decode = hosts(10 * GBIT, 10 * GBIT, kv_bytes=int(GBIT), kv_seconds=1.0)
    for turn in range(1, 151):
        fleet.see([beating(prefill), beating(decode)], 2.0 * turn)
    assert rate(fleet, now=300.0) == pytest.approx(10 * GBIT, rel=0.05), "nothing has landed since"


def test_what_was_sent_over_a_link_is_ahead_of_the_next_at_either_end() -> None:
    workers = [
        *hosts(GBIT, GBIT),
        paced("p1", "prefill", host="10.0.0.3", link_rate=GBIT),
        paced("d1", "decode", host="10.0.0.4", link_rate=GBIT),
    ]
    fleet = fleet_of(workers)
    (p0, p1), (d0, d1) = ([fleet.row(name) for name in names] for names in (("p0", "p1"), ("d0", "d1")))
    fleet.links.send(p0, d0, 2.0, 10.0)
    assert [fleet.links.ahead(*pair, 11.0) for pair in ((p0, d0), (p0, d1), (p1, d0), (p1, d1))] == [1, 1, 1, 0]
    told = forecast(fleet, 1000, np.zeros(len(fleet)), 11.0, 0.0)
    late = lateness(fleet, told, np.array([p0, p1]), np.array([d0, d1]))
    assert late is not None
    assert late.reshape(-1) == pytest.approx(
        [crossing(fleet, told, row, partner).late for partner in (d0, d1) for row in (p0, p1)]
    )
    one = crossing(fleet, told, p1, d1)
    assert (one.alone, one.ahead) == (pytest.approx(1000 * TOKEN / GBIT), 0.0)


def test_a_queue_hides_what_is_ahead_of_the_blocks() -> None:
    waits = paced("p0", "prefill", host="10.0.0.1", link_rate=GBIT, waiting_tokens=2000)
    fleet = fleet_of([waits, hosts(GBIT, GBIT)[1]])
    row, partner = fleet.row("p0"), fleet.row("d0")
    fleet.links.send(row, partner, 1.5, 0.0)
    told = forecast(fleet, 100, np.zeros(len(fleet)), 0.0, 0.0)
    assert crossing(fleet, told, row, partner).late == 0.0
    fleet.links.send(row, partner, 3.0, 0.0)
    assert crossing(fleet, told, row, partner).late == pytest.approx(2.4, rel=0.01)


def test_the_pair_with_the_better_link_is_taken_where_prefill_does_not_hide_it() -> None:
    slow, fast = 1e-4 * GBIT, 10 * GBIT
    workers = [
        paced("p0", "prefill", host="10.0.0.1", link_rate=fast),
        paced("d0", "decode", host="10.0.0.2", link_rate=slow),
        paced("d1", "decode", host="10.0.0.3", link_rate=fast),
    ]
    fleet = fleet_of(workers)
    told = forecast(fleet, 100, np.zeros(len(fleet)), 0.0, 0.0)
    chosen = {place("cost", Snapshot(fleet, told), Demand(True, turn=turn)).decode for turn in range(4)}
    assert chosen == {fleet.row("d1")}


def test_rows_are_kept_when_there_are_more_workers_than_there_were_rows() -> None:
    fleet = fleet_of(hosts(GBIT, GBIT))
    fleet.links.crossed(fleet.row("p0"), fleet.row("d0"), int(GBIT), 4.0, 1.0)
    before = rate(fleet, now=1.0)
    fleet.see([*hosts(GBIT, GBIT), *(paced(f"x{number}", "decode") for number in range(80))], 1.0)
    assert rate(fleet, now=1.0) == pytest.approx(before)
    assert len(fleet.links.pace) == len(fleet)
    assert fleet.links.pace[[fleet.row(f"x{number}") for number in range(80)]].min() > 0.0


def test_rows_of_nobody_count_for_no_link() -> None:
    # Whoever is known is fast: no blocks can be so late that each pair would have to be looked at.
    fast = 100 * GBIT
    workers = hosts(fast, fast)
    fleet = fleet_of(workers)
    for worker in workers:
        fleet.links.hear(fleet.row(worker.peer.name), None, worker.load, 0.0)
    assert fleet.links.pace.size > len(workers)
    assert fleet.links.most(0.0) == pytest.approx(1 / fast)


def test_what_is_kept_of_pairs_goes_with_what_workers_tell() -> None:
    here, there = hosts(GBIT, GBIT)
    fleet = fleet_of([here, there])
    rows, partners = fleet.able("prefill"), fleet.able("decode")
    assert fleet.links.paces(partners, rows, 0.0) == pytest.approx(1 / GBIT)
    fleet.links.know(fleet.row("d0"), msgspec.structs.replace(there.profile, link_rate=GBIT / 4))
    assert fleet.links.paces(partners, rows, 0.0) == pytest.approx(4 / GBIT)


@pytest.mark.parametrize("address", ["shm://abc", "inproc://7", "tcp://[::1", "", "ucx://10.0.0.2:1"])
def test_any_address_is_taken(address: str) -> None:
    worker = hosts(GBIT, GBIT)[1]
    assert isinstance(worker.profile, WorkerProfile)
    profile = worker.profile
    fleet = fleet_of(hosts(GBIT, GBIT))
    fleet.links.know(fleet.row("d0"), type(profile)(**{**_fields(profile), "kv_addresses": (address,)}))
    assert rate(fleet) in (pytest.approx(GBIT), pytest.approx(ASSUMED))
    assert math.isfinite(rate(fleet))


def _fields(profile: WorkerProfile) -> dict[str, object]:
    return {name: getattr(profile, name) for name in profile.__struct_fields__}
