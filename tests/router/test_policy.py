from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_facts import LAYOUT, MODEL, beating, fleet_of, paced, pool, profile, worker

from protocol.errors import NoWorkerAvailable
from protocol.ids import Peer
from protocol.layout import KVLayout
from protocol.versions import Versions
from router.fleet import Fleet
from router.forecast import forecast
from router.pairing import complaints, mismatch
from router.policy import POLICIES, Demand, Snapshot, first_turn, place
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
    fleet = fleet_of(workers)
    for peer, amount in (outstanding or {}).items():
        row = fleet.row(peer.name)
        if fleet.prefill[row]:
            fleet.send_prompt(row, amount, amount, 0.0)
        else:
            fleet.send_sequences(row, amount)
    chosen = place(policy, snapshot_of(fleet), Demand(needs_decode, excluded, turn))
    names = [None if row is None else fleet.workers[row].peer.name for row in (chosen.prefill, chosen.decode)]  # type: ignore[union-attr]
    assert names[0] is not None
    return names[0], names[1]


def snapshot_of(
    fleet: Fleet, *, length: int = 100, cached: dict[str, int] | None = None, now: float = 0.0, slow_start: float = 0.0
) -> Snapshot:
    has = np.zeros(len(fleet))
    for name, tokens in (cached or {}).items():
        has[fleet.row(name)] = tokens
    return Snapshot(fleet, forecast(fleet, length, has, now, slow_start))


def two_by_two(**load: object) -> list[Worker]:
    return [worker("d0", "decode"), worker("d1", "decode"), worker("p0", "prefill", **load), worker("p1", "prefill")]


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2), (2, 3), (4, 2)])
def test_round_robin_comes_through_every_pair(prefill: int, decode: int) -> None:
    workers = [worker(f"d{number}", "decode") for number in range(decode)]
    workers += [worker(f"p{number}", "prefill", waiting_tokens=900 * number) for number in range(prefill)]
    pairs = Counter(pick(workers, policy="round_robin", turn=turn) for turn in range(2 * prefill * decode))
    assert len(pairs) == prefill * decode
    assert set(pairs.values()) == {2}


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


def test_workers_that_cannot_speak_with_each_other_are_no_pair() -> None:
    old = [replace(worker(name, role), speaks=Versions(3, 4)) for name, role in (("p0", "prefill"), ("d0", "decode"))]
    new = [replace(worker(name, role), speaks=Versions(5, 6)) for name, role in (("p1", "prefill"), ("d1", "decode"))]
    both = replace(worker("d2", "decode", running=9), speaks=Versions(4, 5))
    with pytest.raises(NoWorkerAvailable, match="wire version: 3 to 4 here, 5 to 6 there"):
        pick([old[0], new[1]])
    assert pick([old[0], new[1], both]) == ("p0", "d2")
    for turn in range(4):
        assert pick([*old, *new], turn=turn) in {("p0", "d0"), ("p1", "d1")}
    (told,) = complaints(old[0].peer, [old[0], new[1], both], MODEL)
    assert told == "workers p0@1 and d1@1 cannot be paired: wire version: 3 to 4 here, 5 to 6 there"


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
    fleet = fleet_of(workers)
    snapshot, demand = snapshot_of(fleet), Demand(needs_decode, excluded, turn, session=data.draw(st.text(max_size=3)))
    if not possible:
        with pytest.raises(NoWorkerAvailable):
            place(policy, snapshot, demand)
        return
    chosen = place(policy, snapshot, demand)
    left = fleet.workers[chosen.prefill]
    assert left is not None
    if needs_decode:
        assert chosen.decode is not None
        assert (left, fleet.workers[chosen.decode]) in pairs
        avoidable = [pair for pair in pairs if not {each.peer for each in pair} & excluded]
        assert not avoidable or not {left.peer, fleet.workers[chosen.decode].peer} & excluded  # type: ignore[union-attr]
    else:
        assert left in prefill
        assert chosen.decode is None


def test_cost_weighs_what_is_cached_against_what_waits() -> None:
    def chosen(waiting: int) -> str:
        fleet = fleet_of(
            [paced("d0", "decode"), paced("p0", "prefill", waiting_tokens=waiting), paced("p1", "prefill")]
        )
        choice = place("cost", snapshot_of(fleet, length=100, cached={"p0": 80}), Demand(needs_decode=True))
        return fleet.workers[choice.prefill].peer.name  # type: ignore[union-attr]

    assert [chosen(waiting) for waiting in (0, 70, 90, 500)] == ["p0", "p0", "p1", "p1"]


def test_cost_knows_that_some_are_slower() -> None:
    workers = [paced("d0", "decode", running=4), paced("d1", "decode", running=1, token=1e-2), paced("p0", "prefill")]
    assert pick(workers, policy="cost") == ("p0", "d0")


def test_what_a_worker_measured_before_it_was_lost_is_not_held_against_it() -> None:
    """It could never show that it is as fast as the others: who is taken for slow gets no work."""
    slow, others = paced("d0", "decode", token=1.0), [paced("d1", "decode"), paced("p0", "prefill")]
    fleet = fleet_of([*others, slow])
    row, other = fleet.row("d0"), fleet.row("d1")
    for _ in range(100):
        fleet.correct(slow.peer, "decode", 2.0, 0.0)
    assert fleet.columns.step[row] > 100 * fleet.columns.step[other]
    fleet.see([*others, replace(slow, lost="its step loop has stood")], 1.0)
    fleet.see([*others, replace(slow, last_seen=2.0)], 2.0)
    assert fleet.columns.step[row] < 2 * fleet.columns.step[other]


def test_cost_sends_the_sequence_where_its_blocks_are_when_the_link_is_slow() -> None:
    def chosen(seconds: float) -> str:
        link = {"kv_bytes": 1 << 20, "kv_seconds": seconds}
        workers = [paced("d0", "decode", running=3, **link), paced("d1", "decode", **link), paced("p0", "prefill")]
        fleet = fleet_of(workers)
        choice = place("cost", snapshot_of(fleet, cached={"d0": 100}), Demand(needs_decode=True, output=8))
        return fleet.workers[choice.decode].peer.name  # type: ignore[index,union-attr]

    assert [chosen(seconds) for seconds in (1e-3, 100.0)] == ["d1", "d0"]


def test_cost_leaves_workers_without_room_alone() -> None:
    full = worker("d0", "decode", step_per_token=1e-3)
    full = replace(full, load=msgspec.structs.replace(full.load, pool=pool(free=2)))
    assert pick([full, paced("d1", "decode", running=9), paced("p0", "prefill")], policy="cost") == ("p0", "d1")


def test_a_worker_that_has_just_joined_is_filled_slowly() -> None:
    old = [paced("p0", "prefill", waiting_tokens=300), paced("d0", "decode")]
    fleet = fleet_of(old)
    fleet.see([*old, paced("p1", "prefill")], 100.0)

    def chosen(now: float) -> int:
        fleet.see_again(beating(old[0]), now)
        return place("cost", snapshot_of(fleet, now=now, slow_start=10.0), Demand(needs_decode=True)).prefill

    assert chosen(100.5) == fleet.row("p0"), "a tenth of its speed is trusted, and 300 tokens wait at the other"
    assert chosen(108.0) == fleet.row("p1")


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"session_affinity"}))
@pytest.mark.parametrize("size", [2, 20, 60])
def test_requests_that_come_at_once_do_not_herd(policy: str, size: int) -> None:
    workers = [paced(f"{role[0]}{index}", role) for role in ("prefill", "decode") for index in range(size)]  # type: ignore[arg-type]
    fleet = fleet_of(workers)
    prefill, decode = Counter[int](), Counter[int]()
    rounds = 10
    for turn in range(rounds * size):
        choice = place(policy, snapshot_of(fleet), Demand(needs_decode=True, turn=turn))
        assert choice.decode is not None
        fleet.send_prompt(choice.prefill, 100.0, 100, 0.0)
        fleet.send_sequences(choice.decode, 1)
        prefill[choice.prefill] += 1
        decode[choice.decode] += 1
    # What is drawn without looking is spread as such draws are; all others nearly evenly.
    bound = 3.5 * rounds if policy == "random" else 1.8 * rounds if policy == "power_of_two" else 1.2 * rounds
    if policy == "prefix_aware":
        bound = rounds * 1.5
    assert max(prefill.values()) <= bound
    assert max(decode.values()) <= bound


def test_a_short_prompt_is_not_sent_anywhere_because_its_output_is_long() -> None:
    """Equal is what differs by little of the smaller cost, not of the sum."""
    workers = [paced("d0", "decode", token=1.0), paced("p0", "prefill", waiting_tokens=30), paced("p1", "prefill")]
    assert {pick(workers, policy="cost", turn=turn)[0] for turn in range(4)} == {"p1"}


def test_a_session_stays_where_it_is_when_others_join() -> None:
    def pairs(count: int) -> dict[str, tuple[str, str | None]]:
        workers = [worker(f"{role[0]}{index}", role) for role in ("prefill", "decode") for index in range(count)]  # type: ignore[arg-type]
        fleet = fleet_of(workers)
        found = {}
        for session in map(str, range(100)):
            choice = place("session_affinity", snapshot_of(fleet), Demand(needs_decode=True, turn=3, session=session))
            found[session] = tuple(fleet.workers[row].peer.name for row in (choice.prefill, choice.decode))  # type: ignore[index,union-attr]
        return found  # type: ignore[return-value]

    before, after = pairs(4), pairs(5)
    moved = [session for session in before if before[session][0] != after[session][0]]
    assert all(after[session][0] == "p4" for session in moved), "nobody moves but to the new one"
    assert 5 <= len(moved) <= 40
    assert len({pair[0] for pair in before.values()}) == 4


def test_prefix_aware_goes_by_the_prefix_until_the_load_is_too_uneven() -> None:
    def chosen(waiting: int) -> str:
        fleet = fleet_of(
            [worker("d0", "decode"), worker("p0", "prefill", waiting_tokens=waiting), worker("p1", "prefill")]
        )
        choice = place("prefix_aware", snapshot_of(fleet, cached={"p0": 40}), Demand(needs_decode=True))
        return fleet.workers[choice.prefill].peer.name  # type: ignore[union-attr]

    assert [chosen(waiting) for waiting in (0, 4000, 5000)] == ["p0", "p0", "p1"]


def test_routers_that_begin_together_do_not_take_the_same_of_equals() -> None:
    assert first_turn("router-0") == 0
    starts = [first_turn(f"router-{number}") for number in range(8)]
    pairs = {pick(two_by_two(), policy="cost", turn=start) for start in starts}
    assert len(pairs) == 4
    assert first_turn("here") != first_turn("there")
