from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.connections import MAX_PARTED, Connections


def test_the_end_of_a_connection_tells_whose_it_was() -> None:
    connections = Connections()
    connections.accepted(7)
    assert connections.nameless
    connections.named(7, b"a")
    assert not connections.nameless
    assert connections.ended(7) == b"a"
    assert connections.ended(7) is None


def test_a_connection_that_nobody_spoke_on_is_nobodys() -> None:
    connections = Connections()
    connections.accepted(7)
    assert connections.ended(7) is None
    assert not connections.nameless


def test_a_peer_that_has_another_connection_has_not_left() -> None:
    connections = Connections()
    for descriptor in (7, 8):
        connections.accepted(descriptor)
        connections.named(descriptor, b"a")
    assert connections.ended(7) is None
    assert connections.ended(8) == b"a"


def test_a_new_connection_is_known_for_one_whether_the_old_one_has_ended_or_not() -> None:
    connections = Connections()
    connections.accepted(7)
    assert not connections.named(7, b"a"), "the first one is in place of none"
    assert not connections.named(7, b"a")
    connections.accepted(8)
    assert not connections.named(7, b"a"), "what the old one still brings names no new one"
    assert connections.named(8, b"a")
    assert not connections.named(8, b"a"), "told once"
    for descriptor in (7, 8):
        connections.ended(descriptor)
    connections.accepted(7)
    connections.ended(7)
    connections.accepted(7)
    assert connections.named(7, b"a")
    connections.accepted(8)
    assert not connections.named(8, b"b")


def test_who_has_parted_is_not_remembered_for_ever() -> None:
    connections = Connections()
    for number in range(MAX_PARTED + 1):
        connections.accepted(7)
        connections.named(7, b"%d" % number)
        connections.ended(7)
    for number, known in ((0, False), (1, True), (MAX_PARTED, True)):
        connections.accepted(7)
        assert connections.named(7, b"%d" % number) is known
        connections.accepted(7)


def test_a_frame_that_is_read_late_does_not_name_the_next_connection_of_that_descriptor() -> None:
    connections = Connections()
    connections.accepted(7)
    connections.named(7, b"a")
    # Read before the monitor tells that 7 ended and was given to another peer.
    connections.named(7, b"b")
    assert connections.ended(7) == b"a"
    connections.accepted(7)
    connections.named(7, b"b")
    assert connections.ended(7) == b"b"


def test_an_end_that_was_not_told_of_is_made_good_by_the_next_beginning() -> None:
    connections = Connections()
    connections.accepted(7)
    connections.named(7, b"a")
    connections.accepted(7)
    assert connections.nameless
    connections.named(7, b"b")
    assert connections.ended(7) == b"b"


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["accept", "end", b"a", b"b"]))))
def test_a_peer_leaves_with_its_last_connection_and_once(events: list[tuple[int, str | bytes]]) -> None:
    connections = Connections()
    model: dict[int, bytes | None] = {}
    for descriptor, event in events:
        if event == "accept":
            connections.accepted(descriptor)
            model[descriptor] = None
        elif event == "end":
            owner = model.pop(descriptor, None)
            left = owner if owner is not None and owner not in model.values() else None
            assert connections.ended(descriptor) == left
        else:
            assert isinstance(event, bytes)
            connections.named(descriptor, event)
            if descriptor in model and model[descriptor] is None:
                model[descriptor] = event
        assert connections.nameless == (None in model.values())
