from __future__ import annotations

import msgspec
from worker_facts import heartbeat

from protocol.histogram import SECONDS, Observations
from protocol.ids import Peer
from protocol.messages import WorkerLoad
from protocol.transfer_counts import TransferCounts
from router import registry as registry_module
from router.registry import RENEWED, WorkerEvent, WorkerJoined, WorkerLost, WorkerRegistry
from router.totals import COUNTERS

P1, P2 = Peer("p", 1), Peer("p", 2)


def make() -> WorkerRegistry:
    return WorkerRegistry(worker_timeout=2.0, step_age_bound=10.0, forget_after=60.0)


def beat(workers: WorkerRegistry, now: float, peer: Peer = P1, **load: object) -> list[WorkerEvent]:
    return workers.heartbeat(peer, str(peer).encode(), heartbeat("prefill", **load), now)


def ticks(workers: WorkerRegistry, start: float, end: float) -> list[WorkerEvent]:
    events: list[WorkerEvent] = []
    for step in range(round((end - start) * 10) + 1):
        events += workers.tick(start + step / 10)
    return events


def test_first_heartbeat_joins_and_later_ones_are_no_news() -> None:
    workers = make()
    assert beat(workers, 0.0) == [WorkerJoined(P1, returned=False)]
    assert beat(workers, 0.5, waiting=7) == []
    found = workers.find(P1)
    assert found is not None
    assert (found.identity, found.load.waiting, found.last_seen) == (b"p@1", 7, 0.5)


def test_silence_loses_a_worker_once_and_a_heartbeat_brings_it_back() -> None:
    workers = make()
    beat(workers, 0.0)
    assert ticks(workers, 0.0, 2.0) == []
    (lost,) = ticks(workers, 2.1, 5.0)
    assert lost == WorkerLost(P1, "no heartbeat for 2.1 s")
    assert not workers.workers()[0].live
    assert beat(workers, 5.1) == [WorkerJoined(P1, returned=True)]


def test_a_router_that_stood_still_does_not_blame_its_workers() -> None:
    workers = make()
    beat(workers, 0.0)
    assert ticks(workers, 0.0, 0.5) == []
    assert workers.tick(30.0) == [], "the router slept, so it cannot know who was silent"
    assert ticks(workers, 30.1, 31.5) == []
    (lost,) = ticks(workers, 31.6, 33.0)
    assert isinstance(lost, WorkerLost)


def test_a_wedged_step_loop_loses_a_worker_that_still_beats() -> None:
    workers = make()
    beat(workers, 0.0)
    assert beat(workers, 0.5, step_age=10.0) == []
    assert beat(workers, 1.0, step_age=10.5) == [WorkerLost(P1, "its step loop has stood for 10.5 s")]
    assert beat(workers, 1.5, step_age=11.0) == []
    assert beat(workers, 2.0, step_age=0.1) == [WorkerJoined(P1, returned=True)]


def test_a_worker_that_first_shows_up_wedged_does_not_join() -> None:
    workers = make()
    assert beat(workers, 0.0, step_age=99.0) == []
    assert not workers.workers()[0].accepts_work


def test_a_newer_incarnation_replaces_the_old_one() -> None:
    workers = make()
    beat(workers, 0.0)
    assert beat(workers, 0.1, P2) == [
        WorkerLost(P1, "a newer incarnation took its place"),
        WorkerJoined(P2, returned=False),
    ]
    assert workers.find(P1) is None
    assert [worker.peer for worker in workers.workers()] == [P2]


def test_an_older_incarnation_is_not_heard_even_when_the_newer_is_lost() -> None:
    workers = make()
    beat(workers, 0.0, P2)
    assert beat(workers, 0.1, P1) == []
    ticks(workers, 0.0, 3.0)
    assert beat(workers, 3.1, P1) == []
    assert [(worker.peer, worker.live) for worker in workers.workers()] == [(P2, False)]


def test_a_lost_old_incarnation_is_not_lost_again_by_its_successor() -> None:
    workers = make()
    beat(workers, 0.0)
    ticks(workers, 0.0, 3.0)
    assert beat(workers, 3.1, P2) == [WorkerJoined(P2, returned=False)]


def test_draining_stops_new_work_only() -> None:
    workers = make()
    beat(workers, 0.0)
    assert beat(workers, 0.5, draining=True) == []
    (worker,) = workers.workers()
    assert worker.live
    assert not worker.accepts_work
    assert beat(workers, 1.0) == [WorkerJoined(P1, returned=True)]


def test_a_draining_worker_that_dies_is_lost() -> None:
    workers = make()
    assert beat(workers, 0.0, draining=True) == []
    assert [type(event) for event in ticks(workers, 0.0, 3.0)] == [WorkerLost]


def test_unreachable_is_lost_until_it_beats() -> None:
    workers = make()
    beat(workers, 0.0)
    assert [type(event) for event in workers.unreachable(P1)] == [WorkerLost]
    assert workers.unreachable(P1) == []
    assert workers.unreachable(P2) == []
    assert beat(workers, 0.2) == [WorkerJoined(P1, returned=True)]


def test_a_reconnected_worker_is_addressed_anew() -> None:
    workers = make()
    beat(workers, 0.0)
    workers.heartbeat(P1, b"other", heartbeat("prefill"), 0.5)
    found = workers.find(P1)
    assert found is not None
    assert found.identity == b"other"


def test_lost_workers_are_forgotten_in_the_end() -> None:
    workers = make()
    beat(workers, 0.0)
    ticks(workers, 0.0, 59.0)
    assert len(workers.workers()) == 1
    ticks(workers, 59.1, 61.0)
    assert workers.workers() == ()


def test_names_are_bounded() -> None:
    workers = make()
    for index in range(registry_module.MAX_WORKERS):
        beat(workers, 0.0, Peer(f"w{index}", 1))
    assert beat(workers, 0.0, Peer("one-more", 1)) == []
    assert len(workers.workers()) == registry_module.MAX_WORKERS
    assert beat(workers, 0.0, Peer("w0", 2)) != []


def counted(workers: WorkerRegistry) -> tuple[float, float, int]:
    (known,) = workers.workers()
    totals = known.totals
    return totals.counters["kv_bytes"], totals.counters["step_seconds"], totals.transfer.opened


def test_counts_go_on_when_a_worker_starts_again() -> None:
    workers = make()

    def tells(now: float, peer: Peer, kv_bytes: int, opened: int) -> None:
        load = heartbeat("prefill", kv_bytes=kv_bytes, step_seconds=kv_bytes / 8)
        message = msgspec.structs.replace(load, transfer=TransferCounts(opened=opened, open=1))
        workers.heartbeat(peer, str(peer).encode(), message, now)

    tells(0.0, P1, 100, 3)
    tells(0.5, P1, 200, 5)
    assert counted(workers) == (200, 25.0, 5)
    ticks(workers, 0.5, 4.0)
    assert not workers.workers()[0].live
    assert counted(workers) == (200, 25.0, 5), "a death takes nothing back"
    tells(4.0, P2, 10, 1)
    tells(4.1, P1, 300, 9)
    assert counted(workers) == (210, 26.25, 6), "the former incarnation speaks no more"
    tells(4.5, P2, 30, 2)
    tells(5.0, Peer("p", 3), 0, 0)
    assert counted(workers) == (230, 28.75, 7)
    assert workers.workers()[0].totals.transfer.open == 1, "what is open is open now, in the last life"


def test_each_role_of_a_worker_has_counts_of_its_own() -> None:
    workers = make()

    def tells(now: float, peer: Peer, role: str, kv_bytes: int) -> None:
        workers.heartbeat(peer, b"p", heartbeat(role, kv_bytes=kv_bytes), now)

    tells(0.0, P1, "prefill", 100)
    tells(0.5, P2, "decode", 7)
    assert counted(workers)[0] == 7, "what it shipped did not land there"
    tells(1.0, Peer("p", 3), "prefill", 20)
    assert counted(workers)[0] == 120, "and it goes on from there when it comes back"


def test_every_counter_of_a_load_is_summed_up() -> None:
    gauges = {"pool", "waiting", "waiting_tokens", "running", "open_leases", "open_imports", "step_age", "draining"}
    gauges |= {"used_slots", "empty_slots", "swapped_blocks", "step_fixed", "step_per_token", "step_mean_tokens"}
    assert {*COUNTERS} | gauges | {"step_gaps"} == {*WorkerLoad.__struct_fields__}
    assert not {*COUNTERS} & gauges


def test_gaps_between_steps_are_summed_up_over_lives() -> None:
    workers = make()
    for now, peer, gap in ((0.0, P1, 0.25), (0.5, P2, 0.5)):
        gaps = Observations(SECONDS)
        gaps.add(gap)
        workers.heartbeat(peer, b"p", heartbeat("decode", step_gaps=gaps.histogram()), now)
    (known,) = workers.workers()
    assert (known.totals.step_gaps.count, known.totals.step_gaps.total) == (2, 0.75)


def test_a_worker_whose_connection_ends_is_lost_unless_it_beats_over_another() -> None:
    workers = make()
    beat(workers, 0.0)
    workers.disconnected(b"p@1", 0.1)
    assert ticks(workers, 0.1, 0.3) == []
    assert beat(workers, 0.31) == [], "it came back"
    assert ticks(workers, 0.4, 1.0) == []
    workers.disconnected(b"p@1", 1.1)
    assert ticks(workers, 1.1, 1.5) == [WorkerLost(P1, "its connection ended")]
    assert not workers.workers()[0].live
    assert beat(workers, 1.6) == [WorkerJoined(P1, returned=True)]
    assert ticks(workers, 1.7, 2.7) == []


def test_a_new_connection_costs_what_is_under_way_and_no_more() -> None:
    workers = make()
    assert workers.renewed(b"p@1") == []
    beat(workers, 0.0)
    assert workers.renewed(b"nobody") == []
    assert workers.renewed(b"p@1") == [WorkerLost(P1, RENEWED), WorkerJoined(P1, returned=True)]
    assert workers.workers()[0].live
    assert ticks(workers, 0.1, 1.0) == []
    beat(workers, 1.0, draining=True)
    assert workers.renewed(b"p@1") == [WorkerLost(P1, RENEWED)], "it takes no new work"
    ticks(workers, 1.0, 4.0)
    assert workers.renewed(b"p@1") == [], "it was lost already; its heartbeat brings it back"


def test_a_heartbeat_that_was_sent_before_the_connection_ended_is_no_sign_of_life() -> None:
    workers = make()
    beat(workers, 0.0)
    workers.disconnected(b"p@1", 0.1)
    assert beat(workers, 0.11) == []
    assert ticks(workers, 0.2, 0.6) == [WorkerLost(P1, "its connection ended")]


def test_the_end_of_another_connection_harms_nobody() -> None:
    workers = make()
    beat(workers, 0.0)
    beat(workers, 0.0, P2)
    workers.disconnected(b"p@1", 0.1)
    workers.disconnected(b"nobody", 0.1)
    assert ticks(workers, 0.1, 1.0) == []


def test_a_router_that_stood_still_waits_for_those_that_come_back() -> None:
    workers = make()
    beat(workers, 0.0)
    assert ticks(workers, 0.0, 0.5) == []
    workers.disconnected(b"p@1", 0.55)
    assert workers.tick(5.0) == []
