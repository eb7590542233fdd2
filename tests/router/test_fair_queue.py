"""Whose turn it is: shares by weight and tokens, whatever anybody asks for; priorities among one tenant's own."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.slo.classes import SLOClass
from router.slo.fair_queue import FairQueue
from router.slo.shares import FORGET, Shares
from router.slo.ticket import Ticket

Entry = Ticket[None]
PLAIN = SLOClass()
MOST = 400
sizes = st.integers(1, MOST)
backlogs = st.lists(sizes, min_size=40, max_size=60)
weights = st.sampled_from([0.5, 1.0, 2.0, 5.0])


def ticket(
    tenant: str = "", tokens: int = 1, *, slo: SLOClass = PLAIN, weight: float = 1.0, priority: int = 0, at: float = 0.0
) -> Entry:
    return Ticket(
        payload=None, slo=slo, tenant=tenant, weight=weight, priority=priority, prompt=tokens, most=1, arrived=at
    )


def queue_of(*tickets: Entry, aging: float = 2.0) -> FairQueue[Entry]:
    queue: FairQueue[Entry] = FairQueue(aging)
    for each in tickets:
        queue.put(each)
    return queue


def served(queue: FairQueue[Entry]) -> Entry:
    head = queue.head()
    assert head is not None
    queue.serve(head)
    return head


@settings(max_examples=25, deadline=None)
@given(st.lists(backlogs, min_size=2, max_size=4), st.data())
def test_while_tenants_wait_none_gets_more_than_a_request_beyond_its_share(
    asked: list[list[int]], data: st.DataObject
) -> None:
    tenants = {f"t{number}": data.draw(weights) for number in range(len(asked))}
    queue = queue_of(
        *(
            ticket(name, size, weight=tenants[name])
            for name, sizes in zip(tenants, asked, strict=True)
            for size in sizes
        )
    )
    left = dict(zip(tenants, map(len, asked), strict=True))
    got = dict.fromkeys(tenants, 0.0)
    while all(left.values()):
        head = served(queue)
        left[head.tenant] -= 1
        got[head.tenant] += head.tokens / tenants[head.tenant]
        for one in tenants:
            for other in tenants:
                assert got[one] - got[other] <= MOST / tenants[one] + MOST / tenants[other]


@given(backlogs, sizes, st.integers(0, 39))
def test_whoever_comes_to_a_heavy_tenants_queue_waits_for_one_request_of_it_at_most(
    heavy: list[int], own: int, before: int
) -> None:
    queue = queue_of(*(ticket("heavy", size) for size in heavy))
    for _ in range(before):
        served(queue)
    queue.put(ticket("light", own))
    order = [served(queue).tenant for _ in range(2)]
    assert "light" in order


def test_who_was_idle_has_saved_nothing() -> None:
    queue = queue_of(*(ticket("busy", 10) for _ in range(20)), ticket("late", 10))
    for _ in range(10):
        served(queue)
    for _ in range(20):
        queue.put(ticket("late", 10))
    order = [served(queue).tenant for _ in range(16)]
    assert order.count("late") <= 9
    assert all(one != other for one, other in pairwise(order))


@given(st.lists(st.tuples(st.integers(-5, 5), st.floats(0.0, 50.0)), min_size=2, max_size=30), st.floats(0.0, 5.0))
def test_among_a_tenants_own_a_unit_of_priority_is_worth_the_aging(
    asked: list[tuple[int, float]], aging: float
) -> None:
    queue = queue_of(*(ticket(priority=priority, at=at) for priority, at in asked), aging=aging)
    order = [served(queue) for _ in asked]
    assert [each.arrived + each.priority * aging for each in order] == sorted(at + p * aging for p, at in asked)


def test_a_priority_does_not_reach_beyond_its_tenant() -> None:
    queue = queue_of(*(ticket("eager", 10, priority=-100) for _ in range(10)), *(ticket("calm", 10) for _ in range(10)))
    order = [served(queue).tenant for _ in range(10)]
    assert order.count("calm") == 5


def test_classes_share_by_their_weights_however_many_tenants_each_has() -> None:
    fast, slow = SLOClass(name="fast", weight=3.0), SLOClass(name="slow")
    queue = queue_of(
        *(ticket("one", 10, slo=fast) for _ in range(60)),
        *(ticket(f"t{number % 6}", 10, slo=slow) for number in range(60)),
    )
    order = [served(queue) for _ in range(40)]
    assert sum(each.slo is fast for each in order) == 30
    assert len({each.tenant for each in order if each.slo is slow}) == 6


@given(st.lists(st.tuples(st.sampled_from("abc"), sizes), min_size=1, max_size=40), st.sampled_from("abcd"), sizes)
def test_what_is_ahead_of_a_newcomer_is_what_is_served_before_it(
    asked: list[tuple[str, int]], tenant: str, size: int
) -> None:
    queue = queue_of(*(ticket(name, tokens) for name, tokens in asked))
    newcomer = ticket(tenant, size, at=1.0)
    foreseen = queue.ahead(newcomer)
    queue.put(newcomer)
    before = 0.0
    while (head := served(queue)) is not newcomer:
        before += head.tokens
    # What is foreseen cuts requests into tokens: of each other tenant it may be off by less than one.
    assert abs(before - foreseen) <= MOST * len({name for name, _ in asked if name != tenant})


def test_what_came_to_less_or_more_than_was_reckoned_with_is_made_good() -> None:
    queue = queue_of(*(ticket(name, 10) for name in "ab" for _ in range(20)))
    first = served(queue)
    queue.correct(first, 40.0)
    order = [served(queue).tenant for _ in range(6)]
    assert order == ["b"] * 5 + ["a"]


def test_a_correction_from_before_everybody_was_served_is_forgotten() -> None:
    queue = queue_of(ticket("a", 10))
    early = served(queue)
    for name in "ab":
        for _ in range(4):
            queue.put(ticket(name, 10))
    queue.correct(early, -1000.0)
    assert [served(queue).tenant for _ in range(4)] == ["a", "b", "a", "b"]


def test_a_full_class_loses_the_last_of_whoever_has_most_waiting() -> None:
    heavy = [ticket("heavy", 100, at=float(number)) for number in range(4)]
    queue = queue_of(*heavy, ticket("light", 100))
    assert queue.junior(ticket("light", 100)) is heavy[-1]
    assert queue.junior(ticket("new", 100)) is heavy[-1]
    assert queue.junior(ticket("heavy", 1)) is None
    assert queue.junior(ticket("new", 1000)) is None, "it would have more than anybody"


def test_what_is_withdrawn_counts_no_more() -> None:
    first, second, other = ticket("a", 10), ticket("a", 10, at=1.0), ticket("b", 30)
    queue = queue_of(first, second, other)
    queue.discard(second)
    assert (len(queue), queue.tokens, queue.count(PLAIN.name)) == (2, 40.0, 2)
    assert sorted(each.tenant for each in queue) == ["a", "b"]
    queue.discard(first)
    assert served(queue) is other
    assert queue.head() is None


def test_tenants_that_owe_nothing_are_forgotten() -> None:
    shares = Shares()
    shares.add("waits", 1.0, 1e9)
    for number in range(5 * FORGET):
        name = f"t{number}"
        shares.add(name, 1.0, 1.0)
        shares.serve(name, 1.0)
        if number % 2:
            shares.add("waits", 1.0, 1.0)
            shares.serve("waits", 1.0)
    assert len(shares) <= 2 * FORGET


@pytest.mark.parametrize("count", [1, 5])
def test_a_new_period_begins_when_nobody_waits(count: int) -> None:
    shares = Shares()
    for number in range(count):
        shares.add(f"t{number}", 1.0, 5.0)
    for number in range(count):
        shares.serve(f"t{number}", 5.0)
    assert (shares.period, len(shares)) == (1, 0)
