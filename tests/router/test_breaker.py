from __future__ import annotations

import pytest

from protocol.errors import EngineFailure, InvalidRequest, LeaseExpired, Overloaded, Preempted, WorkerDraining
from protocol.ids import Peer
from router.breaker import LONGEST_PAUSE, BreakerLimits, Breakers, BreakerState, is_fault

A, B, C = Peer("a", 1), Peer("b", 1), Peer("c", 1)
LIMITS = BreakerLimits(failures=3, window=30.0, cooldown=5.0)


def tripped(now: float = 0.0) -> Breakers:
    breakers = Breakers(LIMITS)
    for step in range(3):
        breakers.failed([A], f"failure {step}", now + step)
    return breakers


def state(breakers: Breakers, peer: Peer = A) -> BreakerState:
    return breakers.view(peer).state


def test_some_failures_in_a_row_open_it_and_name_the_last() -> None:
    breakers = Breakers(LIMITS)
    assert breakers.failed([A], "first", 0.0) == []
    assert breakers.failed([A], "second", 1.0) == []
    assert breakers.barred(1.0) == frozenset()
    assert breakers.failed([A], "third", 2.0) == [A]
    assert breakers.barred(2.0) == {A}
    view = breakers.view(A)
    assert (view.state, view.reason, view.openings) == (BreakerState.OPEN, "third", 1)


def test_failures_that_lie_further_apart_do_not() -> None:
    breakers = Breakers(LIMITS)
    assert [breakers.failed([A], "", 20.0 * turn) for turn in range(9)] == [[]] * 9


def test_a_worker_that_serves_more_than_it_fails_is_kept() -> None:
    breakers = Breakers(LIMITS)
    for turn in range(20):
        now = turn / 10
        assert not breakers.answered(A, now)
        assert not breakers.answered(A, now)
        assert breakers.failed([A], "", now) == []


def test_one_bad_end_of_many_transfers_is_found_and_the_others_are_kept() -> None:
    """Three prefill workers share a decode worker that breaks every transfer, and another one that does not."""
    breakers = Breakers(LIMITS)
    opened = set()
    prefill = [Peer(f"p{index}", 1) for index in range(3)]
    for turn in range(60):
        peer, now = prefill[turn % 3], turn / 10
        if turn % 2:
            opened |= {*breakers.failed([peer, A], "channel lost", now)}
        else:
            breakers.answered(peer, now)
            breakers.answered(B, now)
    assert opened == {A}


def test_after_its_time_one_request_is_tried_on_it() -> None:
    breakers = tripped()
    assert breakers.barred(6.9) == {A}
    breakers.chosen(A, 6.9)
    assert state(breakers) is BreakerState.OPEN, "the last one left gets work, which is no probe before its time"
    assert breakers.barred(7.0) == frozenset()
    breakers.chosen(A, 7.0)
    assert state(breakers) is BreakerState.HALF_OPEN
    assert breakers.barred(7.1) == {A}, "one at a time"
    assert breakers.answered(A, 7.2)
    assert state(breakers) is BreakerState.CLOSED
    assert breakers.view(A).reason == ""
    assert breakers.failed([A], "", 7.3) == [], "what was before is forgotten"


def test_a_probe_that_fails_doubles_the_pause_up_to_a_bound() -> None:
    breakers, now, pause = tripped(), 2.0, 5.0
    for turn in range(8):
        now += pause
        assert A not in breakers.barred(now)
        breakers.chosen(A, now)
        assert breakers.failed([A], "again", now) == [A]
        pause = min(LONGEST_PAUSE, 2 * pause)
        assert A in breakers.barred(now + pause - 0.01)
        assert breakers.view(A).openings == turn + 2
    breakers.chosen(A, now + pause)
    breakers.answered(A, now + pause)
    for step in range(3):
        breakers.failed([A], "", now + pause + step)
    assert A not in breakers.barred(now + pause + 2 + LIMITS.cooldown), "it begins anew"


def test_a_probe_that_tells_nothing_is_followed_by_another() -> None:
    breakers = tripped()
    breakers.chosen(A, 7.0)
    assert breakers.barred(11.9) == {A}
    assert breakers.barred(12.0) == frozenset()
    breakers.chosen(A, 12.0)
    assert breakers.barred(12.1) == {A}
    assert state(breakers) is BreakerState.HALF_OPEN


def test_what_was_under_way_when_it_opened_moves_nothing() -> None:
    breakers = tripped()
    assert not breakers.answered(A, 2.5)
    assert breakers.failed([A], "", 2.6) == []
    assert state(breakers) is BreakerState.OPEN
    assert breakers.view(A).openings == 1


def test_a_worker_that_comes_back_works_at_once() -> None:
    breakers, successor = tripped(), Peer("a", 2)
    assert breakers.view(successor).state is BreakerState.CLOSED
    breakers.chosen(successor, 2.5)
    assert breakers.barred(2.5) == frozenset()
    assert breakers.view(successor).openings == 1, "a counter never falls"
    breakers.failed([A], "a word of its former life", 2.6)
    assert state(breakers, successor) is BreakerState.CLOSED
    assert breakers.barred(2.6) == frozenset()


def test_who_is_gone_is_forgotten() -> None:
    breakers = tripped()
    breakers.answered(B, 0.0)
    breakers.keep(["b"])
    assert breakers.barred(3.0) == frozenset()
    assert breakers.view(A).openings == 0
    assert breakers.view(C).state is BreakerState.CLOSED


@pytest.mark.parametrize("error", [Preempted, Overloaded, WorkerDraining, InvalidRequest])
def test_a_busy_worker_and_a_bad_request_are_no_faults(error: type[Exception]) -> None:
    assert not is_fault(error("because"))  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [EngineFailure, LeaseExpired])
def test_what_a_fresh_attempt_may_mend_is_one(error: type[Exception]) -> None:
    assert is_fault(error("because"))  # type: ignore[arg-type]
