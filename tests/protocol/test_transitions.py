from __future__ import annotations

from enum import Enum, auto

import pytest

from protocol.errors import IllegalTransition
from protocol.transitions import STORY_LENGTH, Tracker, TransitionTable


class Door(Enum):
    SHUT = auto()
    OPEN = auto()
    GONE = auto()


class Hand(Enum):
    PULL = auto()
    PUSH = auto()
    AXE = auto()


TABLE = TransitionTable(
    "door",
    Door.SHUT,
    {
        (Door.SHUT, Hand.PULL): Door.OPEN,
        (Door.OPEN, Hand.PUSH): Door.SHUT,
        (Door.OPEN, Hand.AXE): Door.GONE,
    },
)


def opened() -> Tracker[Door, Hand]:
    tracker = TABLE.start("front")
    tracker.move(Hand.PULL)
    return tracker


def test_a_legal_move_leads_on() -> None:
    tracker = TABLE.start("front")
    assert tracker.state is Door.SHUT
    assert tracker.allows(Hand.PULL)
    assert tracker.move(Hand.PULL) is tracker.state is Door.OPEN
    assert not tracker.final


def test_an_illegal_move_tells_the_keys_story_and_changes_nothing() -> None:
    tracker = opened()
    tracker.move(Hand.PUSH)
    assert not tracker.allows(Hand.AXE)
    with pytest.raises(IllegalTransition) as caught:
        tracker.move(Hand.AXE)
    assert caught.value.message == "door front: AXE is illegal in SHUT -PULL-> OPEN -PUSH-> SHUT"
    assert tracker.state is Door.SHUT


def test_nothing_leads_out_of_an_end() -> None:
    tracker = opened()
    tracker.move(Hand.AXE)
    assert tracker.final
    assert TABLE.is_final(Door.GONE)
    for hand in Hand:
        with pytest.raises(IllegalTransition):
            tracker.move(hand)


def test_a_story_is_bounded() -> None:
    tracker = TABLE.start("front")
    for _ in range(10_000):
        tracker.move(Hand.PULL)
        tracker.move(Hand.PUSH)
    with pytest.raises(IllegalTransition) as caught:
        tracker.move(Hand.PUSH)
    assert caught.value.message.count("->") == STORY_LENGTH


def test_trackers_do_not_share_their_state() -> None:
    first, second = opened(), TABLE.start("back")
    assert (first.state, second.state) == (Door.OPEN, Door.SHUT)
