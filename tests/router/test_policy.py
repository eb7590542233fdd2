from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_facts import LAYOUT, MODEL, profile, worker

from protocol.errors import NoWorkerAvailable
from protocol.ids import Peer
from protocol.layout import KVLayout
from router.policy import POLICIES, Demand, Snapshot, mismatch, place
from router.registry import Worker

OTHER = KVLayout(num_layers=2, kv_heads=4, head_dim=8, block_size=4)
CONVERTIBLE = KVLayout(num_layers=2, kv_heads=2, head_dim=8, block_size=8, dtype="float32", order="HND")


def pick(
    workers: list[Worker],
    *,
    policy: str = "least_loaded",
    needs_decode: bool = True,
    excluded: frozenset[Peer] = frozenset(),
    turn: int = 0,
    outstanding: dict[Peer, int] | None = None,
) -> tuple[str, str | None]:
    placement = place(policy, Snapshot(workers, outstanding or {}, MODEL), Demand(needs_decode, excluded, turn))
    return placement.prefill.peer.name, None if placement.decode is None else placement.decode.peer.name


def two_by_two(**load: object) -> list[Worker]:
    return [worker("d0", "decode"), worker("d1", "decode"), worker("p0", "prefill", **load), worker("p1", "prefill")]


def test_round_robin_comes_through_every_pair() -> None:
    pairs = Counter(pick(two_by_two(waiting_tokens=900), policy="round_robin", turn=turn) for turn in range(8))
    assert pairs == {("p0", "d0"): 2, ("p1", "d1"): 2, ("p0", "d1"): 2, ("p1", "d0"): 2}


def test_least_loaded_prefers_fewest_prompt_tokens_and_fewest_sequences() -> None:
    workers = [
        worker("d0", "decode", running=2, waiting=2),
        worker("d1", "decode", running=3),
        worker("p0", "prefill", waiting_tokens=100),
        worker("p1", "prefill", waiting_tokens=99, running=50),
    ]
    assert {pick(workers, turn=turn) for turn in range(4)} == {("p1", "d1")}


def test_least_loaded_counts_our_own_outstanding_work() -> None:
    workers = two_by_two()
    outstanding = {Peer("p0", 1): 10, Peer("d1", 1): 1}
    assert {pick(workers, outstanding=outstanding, turn=turn) for turn in range(4)} == {("p1", "d0")}


def test_equals_take_turns() -> None:
    assert Counter(pick(two_by_two(), turn=turn)[0] for turn in range(10)) == {"p0": 5, "p1": 5}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_excluded_peers_are_avoided_while_there_are_others(policy: str) -> None:
    workers = two_by_two()
    excluded = frozenset({Peer("p0", 1), Peer("d1", 1)})
    assert {pick(workers, policy=policy, excluded=excluded, turn=turn) for turn in range(4)} == {("p1", "d0")}
    everyone = frozenset(each.peer for each in workers)
    assert pick(workers, policy=policy, excluded=everyone)[0] in ("p0", "p1")


def test_an_exclusion_names_one_incarnation() -> None:
    workers = [worker("p0", "prefill", incarnation=2, waiting_tokens=5), worker("p1", "prefill", waiting_tokens=9)]
    assert pick(workers, needs_decode=False, excluded=frozenset({Peer("p0", 1)})) == ("p0", None)


def test_workers_of_another_geometry_are_not_paired() -> None:
    workers = [
        worker("d0", "decode", layout=OTHER),
        worker("d1", "decode", running=40),
        worker("p0", "prefill"),
        worker("p1", "prefill", layout=OTHER, waiting_tokens=9),
    ]
    assert pick(workers) == ("p0", "d1")
    with pytest.raises(NoWorkerAvailable, match=r"p0 \(here\) and d0 \(there\): kv_heads: 2 here, 4 there"):
        pick([workers[0], workers[2]])


def test_load_decides_among_workers_whose_layouts_can_be_converted() -> None:
    workers = [
        worker("d0", "decode", layout=CONVERTIBLE),
        worker("d1", "decode", running=1),
        worker("p0", "prefill"),
    ]
    assert pick(workers) == ("p0", "d0")
    assert mismatch(profile("prefill"), profile("decode", layout=CONVERTIBLE)) is None


def test_workers_of_another_model_are_left_out() -> None:
    workers = [worker("d0", "decode"), worker("p0", "prefill", model="other")]
    with pytest.raises(NoWorkerAvailable, match="no prefill worker"):
        pick(workers)


def test_lost_and_draining_workers_get_nothing() -> None:
    workers = [
        worker("d0", "decode", draining=True),
        worker("d1", "decode", running=9),
        worker("p0", "prefill", lost="gone"),
        worker("p1", "prefill", waiting_tokens=9),
    ]
    assert pick(workers) == ("p1", "d1")
    with pytest.raises(NoWorkerAvailable, match="no decode worker"):
        pick([workers[0], workers[3]])


def test_a_request_of_one_token_needs_no_decode_worker() -> None:
    assert pick([worker("p0", "prefill")], needs_decode=False) == ("p0", None)


def test_a_mismatch_names_both_values() -> None:
    reason = mismatch(profile("prefill"), profile("decode", layout=OTHER))
    assert reason == "kv_heads: 2 here, 4 there"
    assert mismatch(profile("prefill"), profile("decode", model="b")) == "model: 'tiny' here, 'b' there"
    assert mismatch(profile("prefill", layout=LAYOUT), profile("decode")) is None


_workers = st.lists(
    st.builds(
        lambda index, role, layout, lost, draining, load: worker(
            f"w{index}",
            role,
            layout=layout,
            lost=lost,
            draining=draining,
            waiting_tokens=load,
            running=load,
        ),
        index=st.integers(0, 99),
        role=st.sampled_from(["prefill", "decode"]),
        layout=st.sampled_from([LAYOUT, CONVERTIBLE, OTHER]),
        lost=st.sampled_from(["", "gone"]),
        draining=st.booleans(),
        load=st.integers(0, 5),
    ),
    max_size=8,
    unique_by=lambda each: each.peer.name,
)


@given(_workers, st.sampled_from(sorted(POLICIES)), st.integers(0, 1000), st.booleans(), st.data())
def test_a_placement_is_always_able_and_found_when_there_is_one(
    workers: list[Worker], policy: str, turn: int, needs_decode: bool, data: st.DataObject
) -> None:
    excluded = data.draw(st.frozensets(st.sampled_from([each.peer for each in workers]))) if workers else frozenset()
    able = [each for each in workers if each.accepts_work]
    prefill = [each for each in able if each.profile.role == "prefill"]
    pairs = [
        (left, right)
        for left in prefill
        for right in able
        if right.profile.role == "decode" and left.profile.layout.kv_heads == right.profile.layout.kv_heads
    ]
    possible = bool(pairs) if needs_decode else bool(prefill)
    snapshot, demand = Snapshot(workers, {}, MODEL), Demand(needs_decode, excluded, turn)
    if not possible:
        with pytest.raises(NoWorkerAvailable):
            place(policy, snapshot, demand)
        return
    placement = place(policy, snapshot, demand)
    if needs_decode:
        assert (placement.prefill, placement.decode) in pairs
    else:
        assert placement.prefill in prefill
        assert placement.decode is None
