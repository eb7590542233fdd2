"""What one router reckons with of each worker: the work ahead of it, and how fast it is."""

from __future__ import annotations

import numpy as np
import pytest
from worker_facts import beating, fleet_of, paced

from protocol.ids import Peer
from router.forecast import forecast
from router.glance import glance
from router.lane import PASSED
from router.policy import Demand, Snapshot, place


def test_what_was_sent_counts_until_it_is_over_and_no_heartbeat_counts_it_twice() -> None:
    """Heartbeats tell of all routers' work, and of whole prompts, whatever of them is cached."""
    workers = [paced("p0", "prefill"), paced("d0", "decode")]
    fleet = fleet_of(workers)
    prompts, sequences = fleet.row("p0"), fleet.row("d0")
    fleet.send_prompt(prompts, 50.0, 200, 0.0)
    fleet.send_sequences(sequences, 3)
    beats = [paced("p0", "prefill", waiting_tokens=220), paced("d0", "decode", running=2, waiting=2)]
    fleet.see(beats, 0.5)
    assert (fleet.columns.ahead[prompts], fleet.columns.sequences[sequences]) == (70.0, 4.0)
    fleet.prompt_over(beats[0].peer, 50.0, 200, 0.6, computed=True)
    for _ in range(3):
        fleet.sequence_over(beats[1].peer)
    assert (fleet.columns.ahead[prompts], fleet.columns.sequences[sequences]) == (20.0, 1.0), "what others have stays"
    fleet.sequence_over(beats[1].peer)
    fleet.see([paced("p0", "prefill"), paced("d0", "decode")], 1.0)
    assert (fleet.columns.ahead[prompts], fleet.columns.sequences[sequences]) == (0.0, 0.0)


def test_a_new_life_of_a_worker_has_nothing_of_the_last_one() -> None:
    first, partner = paced("p0", "prefill"), paced("d0", "decode")
    fleet = fleet_of([first, partner])
    row = fleet.row("p0")
    fleet.send_prompt(row, 50.0, 50, 0.0)
    fleet.see([paced("p0", "prefill", incarnation=2), partner], 1.0)
    fleet.prompt_over(first.peer, 50.0, 50, 1.1, computed=False)
    assert fleet.columns.ahead[row] == 0.0


def test_what_is_at_the_head_of_the_queue_is_less_and_less_until_its_first_token() -> None:
    fleet = fleet_of([paced("p0", "prefill"), paced("d0", "decode")])
    row, peer = fleet.row("p0"), Peer("p0", 1)

    def waits(now: float) -> float:
        told = forecast(fleet, 100, np.zeros(len(fleet)), now, 0.0)
        return float(told.ttft[row] - told.compute[row])

    assert waits(0.0) == 0.0
    fleet.send_prompt(row, 1000.0, 1000, 1.0)
    fleet.send_prompt(row, 500.0, 500, 1.2)
    left = (1.0 - PASSED) * 1.0
    assert [waits(now) for now in (1.2, 1.6, 2.0, 9.0)] == pytest.approx([1.3, 0.9, 0.5 + left, 0.5 + left])
    fleet.prompt_over(peer, 1000.0, 1000, 2.2, computed=True)
    assert [waits(now) for now in (2.2, 2.5, 9.0)] == pytest.approx([0.5, 0.2, 0.5 * left])
    fleet.prompt_over(peer, 500.0, 500, 3.0, computed=False)
    assert waits(3.0) == 0.0


def test_who_is_overdue_is_no_equal_of_who_has_nothing_to_do() -> None:
    fleet = fleet_of([paced("p0", "prefill"), paced("p1", "prefill"), paced("d0", "decode")])
    fleet.send_prompt(fleet.row("p0"), 1000.0, 1000, 1.0)
    for turn in range(4):
        demand = Demand(needs_decode=True, turn=turn, prompt_tokens=1000)
        told = forecast(fleet, 1000, np.zeros(len(fleet)), 60.0, 0.0)
        assert place("cost", Snapshot(fleet, told), demand).prefill == fleet.row("p1")
        found = glance(fleet, 1000, {}, demand, 60.0, 0.0)
        assert found is not None
        assert found[0].prefill == fleet.row("p1")


def test_equal_workers_are_told_apart_by_where_they_were_measured_not_by_their_slopes() -> None:
    """The one that has always had four sequences sees no slope, and halves its time; the other has seen many."""
    flat = paced("d0", "decode", token=2e-3, step_fixed=8e-3, step_mean_tokens=4.0, running=4)
    steep = paced("d1", "decode", token=5e-4, step_fixed=14e-3, step_mean_tokens=4.0, running=4)
    fleet = fleet_of([flat, steep, paced("p0", "prefill")])
    for turn in range(1, 400):
        steps = 10_000 + turn
        fleet.see([beating(flat, steps=steps), beating(steep, steps=steps), paced("p0", "prefill")], 0.5 * turn)
    rows = [fleet.row(name) for name in ("d0", "d1")]
    assert fleet.columns.step[rows[0]] == pytest.approx(fleet.columns.step[rows[1]], rel=0.02)
    assert fleet.columns.step[rows[0]] == pytest.approx(0.017, rel=0.05)


def test_who_is_taken_for_slow_and_gets_no_work_is_taken_for_one_of_the_others_again() -> None:
    others = [paced(f"d{number}", "decode") for number in range(1, 6)]
    slow = paced("d0", "decode", token=3e-3)
    fleet = fleet_of([*others, slow])
    row, other = fleet.row("d0"), fleet.row("d1")
    assert fleet.columns.step[row] > 2 * fleet.columns.step[other]
    for turn in range(1, 100):
        fleet.see([*others, beating(slow)], 0.5 * turn)
    assert fleet.columns.step[row] == pytest.approx(fleet.columns.step[other], rel=0.4)


def test_a_correction_is_mostly_that_of_the_role_and_a_workers_own_fades() -> None:
    workers = [paced("d0", "decode"), paced("d1", "decode"), paced("p0", "prefill")]
    fleet = fleet_of(workers)
    rows = [fleet.row(name) for name in ("d0", "d1")]
    found = []
    for count in (10, 20):
        for _ in range(count):
            fleet.correct(workers[0].peer, "decode", 2.0, 0.0)
        found.append(forecast(fleet, 10, np.zeros(len(fleet)), 0.0, 0.0).tpot[rows] / 1e-3)
    (own, other), (later_own, later_other) = found
    assert own == other == pytest.approx(2.0), "that may be noise"
    assert later_other == pytest.approx(8.0), "more is not believed"
    assert later_other < later_own < 1.1 * later_other
    assert (fleet.common["prefill"].at(0.0), fleet.common["local"].at(0.0)) == (1.0, 1.0)
    fleet.see([beating(each) for each in workers], 100.0)
    assert fleet.columns.step[rows[0]] == pytest.approx(fleet.columns.step[rows[1]], rel=1e-3)
