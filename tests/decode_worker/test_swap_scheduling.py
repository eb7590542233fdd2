"""The decode scheduler with host memory beside its pool: who makes room, who comes back, and whose memory it is."""

from __future__ import annotations

import pytest
from swap_stage import ROUTER, STOP, Stage

from decode_worker.sequence import SequenceState, import_owner
from engine.batch import Draw
from protocol.ids import RequestKey


def test_the_junior_goes_out_and_comes_back_as_it_was() -> None:
    stage = Stage()
    old, young = stage.two()
    assert young.tracker.state is SequenceState.SWAPPING_OUT
    assert len(young.slots) == stage.book.used == 4
    tokens, table, computed = list(young.token_ids), list(young.block_table), young.computed
    # Until it is copied its blocks are its own, and whoever wants one waits; nobody else is sent out meanwhile.
    assert stage.subject.next_step().sequences == ()
    assert [stage.pool.state(block).name for block in table] == ["ACTIVE"] * 4
    stage.subject.copied(young, 1.0)
    assert (young.tracker.state, stage.subject.waiting, stage.subject.idle) == (SequenceState.SWAPPED, 1, False)
    assert stage.subject.find(young.key) is young
    assert stage.subject.asked_by(ROUTER) == [old.key, young.key]
    assert stage.subject.next_step().sequences == (old,)
    assert stage.subject.admit() == []
    stage.subject.complete_step([Draw(STOP)])
    assert stage.subject.admit() == [young]
    assert young.tracker.state is SequenceState.SWAPPING_IN
    assert stage.subject.next_step().sequences == ()
    stage.subject.copied(young, 2.0)
    assert (young.tracker.state, young.token_ids, young.computed) == (SequenceState.RUNNING, tokens, computed)
    assert (len(young.block_table), stage.book.used) == (4, 0)
    assert stage.subject.next_step().sequences == (young,)
    stage.pool.check_integrity()


def test_what_the_prefix_cache_still_has_is_not_copied_back() -> None:
    stage = Stage()
    _, young = stage.two()
    full = young.block_table[:3]
    stage.subject.copied(young, 1.0)
    stage.subject.drop(RequestKey("old", 0))
    stage.subject.admit()
    assert young.cached_blocks >= 3
    assert young.block_table[:3] == full


def test_without_host_memory_left_the_junior_goes_back_to_the_router() -> None:
    stage = Stage(slots=4)
    stage.running("old", 8)
    young = stage.running("young", 8, first=200)
    while not (step := stage.subject.next_step()).preempted:
        stage.subject.complete_step([Draw(3)] * len(step.sequences))
    assert (step.preempted, step.swapped_out) == ((young,), ())
    assert step.sequences == (stage.subject.find(RequestKey("old", 0)),), "there is room at once"


def test_a_sequence_that_is_better_prefilled_anew_is() -> None:
    stage = Stage(swaps=False)
    stage.running("old", 8)
    young = stage.running("young", 8, first=200)
    while not (step := stage.subject.next_step()).preempted:
        stage.subject.complete_step([Draw(3)] * len(step.sequences))
    assert step.preempted == (young,)


def test_the_lowest_priority_makes_room_then_the_newest() -> None:
    stage = Stage(num_blocks=13, slots=20)
    low = stage.running("low", 8, seniority=-10.0)
    stage.now = 1.0
    old, new = stage.running("old", 8, first=200), stage.running("new", 8, first=300)
    assert stage.until_swapped() is low
    stage.subject.copied(low, 1.0)
    assert stage.until_swapped() is new
    assert old.tracker.state is SequenceState.RUNNING


def test_room_goes_to_the_senior_whether_it_waits_or_is_out() -> None:
    stage = Stage()
    _, young = stage.two()
    stage.subject.copied(young, 1.0)
    later = stage.add("later", tuple(range(300, 304)))
    urgent = stage.add("urgent", tuple(range(400, 404)), seniority=5.0)
    stage.subject.drop(RequestKey("old", 0))
    assert stage.subject.admit() == [urgent, young]
    assert later.tracker.state is SequenceState.WAITING, "it would fit, but not before it is its turn"


def test_the_queue_ages() -> None:
    """A unit of priority is worth some seconds of waiting, and no more: who came so much earlier goes first."""
    stage = Stage(sequences=1)
    stage.running("first", 4)
    names = []
    for second in range(10):
        stage.now = float(second)
        # Ordinary ones at 0 and 4; each of the others counts as having waited three seconds more.
        ordinary = second in (0, 4)
        stage.add(f"at {second}", (50 + second,), seniority=0.0 if ordinary else 3.0)
    stage.subject.drop(RequestKey("first", 0))
    while admitted := stage.subject.admit():
        names.append(int(admitted[0].key.request_id.removeprefix("at ")))
        stage.subject.drop(admitted[0].key)
        stage.pool.release_all(import_owner(admitted[0].key))
    assert names == [1, 2, 0, 3, 5, 6, 4, 7, 8, 9]


@pytest.mark.parametrize("way", ["out", "in"])
@pytest.mark.parametrize("ends", ["well", "badly"])
def test_a_drop_during_a_copy_keeps_blocks_and_slots_until_it_has_ended(way: str, ends: str) -> None:
    stage = Stage()
    old, young = stage.two()
    if way == "in":
        stage.subject.copied(young, 1.0)
        stage.subject.drop(old.key)
        stage.subject.admit()
    table = list(young.block_table)
    assert stage.subject.drop(young.key) is young
    assert stage.subject.drop(young.key) is None
    assert young.tracker.state is SequenceState.LEAVING
    assert stage.book.used == 4
    assert all(stage.pool.state(block).name == "ACTIVE" for block in table)
    if ends == "well":
        stage.subject.copied(young, 2.0)
    else:
        assert not stage.subject.copy_failed(young)
    assert (young.tracker.state, stage.book.used) == (SequenceState.GONE, 0)
    assert stage.subject.find(young.key) is None
    if way == "out":
        assert stage.subject.next_step().sequences == (old,)
    stage.pool.check_integrity()
    stage.book.slots.check_integrity()


def test_a_copy_that_fails_gives_the_request_back() -> None:
    stage = Stage()
    old, young = stage.two()
    assert stage.subject.copy_failed(young)
    assert (young.tracker.state, stage.book.used) == (SequenceState.GONE, 0)
    assert stage.subject.next_step().sequences == (old,)


def test_who_has_been_out_for_too_long_is_given_up() -> None:
    stage = Stage()
    _, young = stage.two()
    stage.subject.copied(young, 10.0)
    assert stage.subject.give_up(10.0) == []
    assert stage.subject.give_up(10.1) == [young]
    assert (young.tracker.state, stage.book.used, stage.subject.waiting) == (SequenceState.GONE, 0, 0)
