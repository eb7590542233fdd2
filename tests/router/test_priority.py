"""A request's priority: refused where it is wrong, and the same seniority on both legs and over all attempts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from request_cases import LIMITS, OTHER_PAIR, P0, PAIR, PROMPT, failure, only
from worker_facts import worker

from protocol.errors import InvalidRequest
from protocol.messages import Prefill, Reserve
from protocol.sampling import SamplingParams
from router.front.generation import Generation
from router.instructions import Instruction, SendPrefill, SendReserve
from router.policy import Placement
from router.priority import MAX_PRIORITY, seniority
from router.request import RequestMachine
from router.request_limits import RequestLimits

priorities = st.integers(-MAX_PRIORITY, MAX_PRIORITY)
moments = st.floats(0.0, 1000.0)


def machine(priority: int = 0, *, limits: RequestLimits = LIMITS) -> RequestMachine:
    return RequestMachine("r", Generation(PROMPT, SamplingParams(max_tokens=8), priority=priority), limits)


def opened(instructions: list[Instruction]) -> tuple[Reserve, Prefill]:
    (reserve,), (prefill,) = only(SendReserve, instructions), only(SendPrefill, instructions)
    return reserve.message, prefill.message


def test_both_legs_are_told_the_same_seniority_and_a_retry_keeps_its_age() -> None:
    request = machine(-3, limits=replace(LIMITS, priority_aging=2.0))
    request.submit(10.0)
    first = opened(request.placed(PAIR, 10.5))
    assert [message.seniority for message in first] == [6.5, 6.5]
    request.failed(P0.peer, failure("preempted"), 14.0)
    second = opened(request.placed(OTHER_PAIR, 15.0))
    assert [message.seniority for message in second] == [11.0, 11.0]
    assert [message.key.attempt for message in second] == [1, 1]


def test_without_aging_a_priority_weighs_nothing() -> None:
    request = machine(50, limits=replace(LIMITS, priority_aging=0.0))
    request.submit(1.0)
    assert [message.seniority for message in opened(request.placed(PAIR, 3.0))] == [2.0, 2.0]


@given(priorities, priorities, moments, moments, moments, st.floats(0.0, 10.0))
def test_two_requests_never_change_places_and_nobody_is_passed_for_longer_than_the_bound(
    one: int, other: int, came: float, later: float, waited: float, aging: float
) -> None:
    came, later = min(came, later), max(came, later)
    begin, end = later, later + waited

    def ahead(now: float) -> float:
        return seniority(now - came, one, aging) - seniority(now - later, other, aging)

    assert ahead(begin) == pytest.approx(ahead(end), abs=1e-6)
    if later - came > 2 * MAX_PRIORITY * aging + 1e-6:
        assert ahead(end) > 0, "whoever comes so much later waits for it"


@pytest.mark.parametrize("priority", [-MAX_PRIORITY - 1, MAX_PRIORITY + 1])
def test_a_priority_out_of_bounds_is_refused(priority: int) -> None:
    with pytest.raises(InvalidRequest, match=f"priority.*{priority}") as caught:
        machine(priority)
    assert caught.value.field == "priority"


def test_the_decode_leg_is_told_what_prefill_gets_through() -> None:
    busy = worker("p0", "prefill", prefill_tokens=300, cached_tokens=100, steps=4, step_seconds=2.0)
    request = machine()
    request.submit(0.0)
    reserve, _ = opened(request.placed(Placement(busy, PAIR.decode), 0.0))
    assert reserve.prefill_rate == 200.0
    assert P0.prefill_rate == 0.0, "it has done no step"
