"""Frames that the release before has written: what it says is understood, and what it is told it understands."""

from __future__ import annotations

import typing
from pathlib import Path

import msgpack
import pytest
from record_wire import recorded

from protocol.codec import MAGIC, OLDEST, SINCE, SPOKEN, VERSION, decode, encode
from protocol.errors import ConfigError
from protocol.messages import Message
from protocol.versions import UNTOLD, Versions

FRAMES = tuple(recorded(Path(__file__).with_name(f"wire_{OLDEST}.frames")))

GONE = {"handover": {"ship", "transport"}}
"""Fields that are not sent any more, by the tag of their message: whoever read them takes their defaults."""


def holds(told: object, known: object) -> bool:
    """Whether everything that is ``known`` is told, be it among more; a field at its default may be left out."""
    if isinstance(known, dict):
        return isinstance(told, dict) and all(name in told and holds(told[name], known[name]) for name in known)
    if isinstance(known, list):
        return isinstance(told, list) and len(told) >= len(known) and all(map(holds, told, known))
    return told == known


def test_there_is_a_frame_of_every_kind_that_it_had() -> None:
    kinds = {type(decode(frame).body) for frame in FRAMES}
    assert {frame[:3] for frame in FRAMES} == {MAGIC + bytes([OLDEST])}
    assert kinds == set(typing.get_args(Message)) - {*SINCE}
    assert all(OLDEST < version <= VERSION for version in SINCE.values())


@pytest.mark.parametrize("number", range(len(FRAMES)))
def test_its_fields_are_there_and_each_means_what_it_meant(number: int) -> None:
    frame = FRAMES[number]
    envelope = decode(frame)
    sender, body = msgpack.unpackb(frame[3:])
    assert envelope.speaks == UNTOLD
    again = encode(envelope.sender, envelope.body, OLDEST)
    assert again[:3] == frame[:3], "as it would be sent to who wrote it"
    told_sender, told_body, speaks = msgpack.unpackb(again[3:])
    assert told_sender == sender
    gone = GONE.get(body["type"], set())
    assert not gone & told_body.keys()
    assert holds(told_body, {name: value for name, value in body.items() if name not in gone})
    assert speaks == [SPOKEN.lowest, SPOKEN.highest]


def test_two_that_meet_speak_the_highest_that_both_know() -> None:
    assert Versions(4, 5).common(Versions(5, 6)) == 5
    assert Versions(4, 6).common(Versions(4, 5)) == 5
    assert Versions(4, 5).common(Versions(6, 7)) is None
    assert (str(Versions(4, 5)), str(UNTOLD)) == ("4 to 5", "4")
    assert Versions(VERSION - 1, VERSION) == SPOKEN
    with pytest.raises(ConfigError, match="lowest must be at most highest, 3, got 4"):
        Versions(4, 3)
