"""The lease book: blocks that ship layer range by layer range while the rest of them is computed."""

from __future__ import annotations

import pytest
from lease_cases import KEY, LAYOUT, READER, grant, kinds, opened, report

from kv_transfer.instructions import Hold, Quarantine, Release, Send, Ship, StopShips
from kv_transfer.lease import LeaseBook
from kv_transfer.lease_state import Layers
from protocol.errors import ChannelLost, EngineFailure, InvariantViolation
from protocol.layout import KVLayout
from protocol.messages import Handover

DEEP = KVLayout(num_layers=8, kv_heads=2, head_dim=4, block_size=4, dtype="float32")


@pytest.fixture
def book() -> LeaseBook:
    return opened(LeaseBook())


def tell(book: LeaseBook, blocks: list[int], done: int, now: float = 0.0) -> list[tuple[int, tuple[int, ...], range]]:
    """Announce layers; returns ``(ship, blocks, layers)`` of what ships."""
    return ranges(book.computed(KEY, blocks, now, layers=Layers(done, DEEP)))


def ranges(instructions: list[object]) -> list[tuple[int, tuple[int, ...], range | None]]:
    return [(each.ship_id, each.source_blocks, each.layers) for each in instructions if isinstance(each, Ship)]


def land(book: LeaseBook, ship: Ship, now: float = 1.0) -> list[object]:
    layers = range(DEEP.num_layers) if ship.layers is None else ship.layers
    nbytes = len(ship.source_blocks) * len(layers) * DEEP.layer_bytes
    return list(book.shipped(KEY, ship.ship_id, nbytes, ship.finishes, now))


def test_layers_ship_as_they_are_computed_and_the_blocks_are_held_once(book: LeaseBook) -> None:
    book.grant(READER, grant(layout=DEEP), 0.0)
    first = book.computed(KEY, [5, 6], 0.0, layers=Layers(3, DEEP))
    assert kinds(first) == ["Hold", "Ship"]
    assert first[0] == Hold(KEY, (5, 6))
    assert ranges(first) == [(0, (5, 6), range(3))]
    assert tell(book, [5, 6], 6) == [(1, (5, 6), range(3, 6))]
    last = book.computed(KEY, [5, 6], 0.0)
    assert kinds(last) == ["Ship"], "held already"
    assert ranges(last) == [(2, (5, 6), range(6, 8))]
    # The next blocks go whole.
    rest = book.computed(KEY, [9], 0.0)
    assert kinds(rest) == ["Hold", "Ship"]
    assert ranges(rest) == [(3, (9,), None)]
    book.check_integrity()


def test_the_handover_counts_each_block_once_and_every_byte(book: LeaseBook) -> None:
    book.grant(READER, grant(layout=DEEP), 0.0)
    ships = [each for each in book.computed(KEY, [5, 6], 0.0) if isinstance(each, Ship)]
    for done in (2, 5):
        ships += [each for each in book.computed(KEY, [9], 0.0, layers=Layers(done, DEEP)) if isinstance(each, Ship)]
    ships += [each for each in book.computed(KEY, [9], 0.0) if isinstance(each, Ship)]
    assert [ship.finishes for ship in ships] == [2, 0, 0, 1]
    (send,) = book.finished(KEY, 3, 1.0)
    # In whatever order they are acknowledged: it is what was handed over.
    assert [land(book, ship) for ship in reversed(ships)] == [[], [], [], []]
    assert isinstance(send, Send)
    assert isinstance(send.message, Handover)
    assert (send.message.blocks, send.message.nbytes) == (3, 3 * DEEP.block_bytes)
    book.check_integrity()


def test_a_grant_in_mid_chunk_ships_what_is_there(book: LeaseBook) -> None:
    book.computed(KEY, [5], 0.0)
    assert tell(book, [6, 9], 2) == []
    assert tell(book, [6, 9], 4) == []
    assert ranges(book.grant(READER, grant(layout=DEEP), 0.0)) == [(0, (5,), None), (1, (6, 9), range(4))]
    assert tell(book, [6, 9], 6) == [(2, (6, 9), range(4, 6))]


def test_a_grant_after_the_chunk_ships_it_whole(book: LeaseBook) -> None:
    tell(book, [5, 6, 9], 4)
    assert kinds(book.computed(KEY, [5, 6, 9], 0.0)) == []
    assert ranges(book.grant(READER, grant(layout=DEEP), 0.0)) == [(0, (5, 6, 9), None)]


@pytest.mark.parametrize("first_block", [0, 1, 2, 3])
def test_only_wanted_blocks_ship(book: LeaseBook, first_block: int) -> None:
    book.grant(READER, grant(first_block, (21, 22, 23)[first_block:], layout=DEEP), 0.0)
    ships: list[Ship] = []
    for blocks in ([5, 6], [9]):
        for layers in (Layers(2, DEEP), Layers(7, DEEP), None):
            told = book.computed(KEY, blocks, 0.0, layers=layers)
            ships += [each for each in told if isinstance(each, Ship)]
            book.check_integrity()
    seen: dict[int, list[int]] = {}
    for ship in ships:
        for source, target in zip(ship.source_blocks, ship.target_blocks, strict=True):
            assert target == {5: 21, 6: 22, 9: 23}[source]
            seen.setdefault(source, []).extend(ship.layers or range(8))
    assert seen == {block: list(range(8)) for block in (5, 6, 9)[first_block:]}
    assert kinds(book.finished(KEY, 3, 1.0)) == ["Handover"]
    assert not any(land(book, ship) for ship in ships)


def test_a_reader_of_another_layout_gets_its_blocks_whole(book: LeaseBook) -> None:
    other = KVLayout(num_layers=8, kv_heads=2, head_dim=4, block_size=4, dtype="bfloat16")
    book.grant(READER, grant(layout=other), 0.0)
    assert tell(book, [5, 6], 4) == []
    assert ranges(book.computed(KEY, [5, 6], 0.0)) == [(0, (5, 6), None)]


def test_a_step_that_fails_in_its_middle_quarantines_what_ships(book: LeaseBook) -> None:
    book.grant(READER, grant(layout=DEEP), 0.0)
    (_, ship) = book.computed(KEY, [5, 6, 9], 0.0, layers=Layers(4, DEEP))
    assert isinstance(ship, Ship)
    failed = book.fail(KEY, EngineFailure("layer 5 raised"), 1.0)
    assert kinds(failed) == ["StopShips", "Quarantine", "Refuse", "Failed"]
    assert isinstance(failed[0], StopShips)
    assert failed[1] == Quarantine(KEY)
    # The step's other layers, had it gone on, are nobody's business any more.
    assert book.computed(KEY, [5, 6, 9], 2.0, layers=Layers(6, DEEP)) == []
    assert book.computed(KEY, [5, 6, 9], 2.0) == []
    assert book.ship_failed(KEY, ship.ship_id, ChannelLost("aborted"), 3.0) == [Release(KEY)]


def test_a_band_that_finishes_what_it_must_not_is_a_fault(book: LeaseBook) -> None:
    book.grant(READER, grant(layout=DEEP), 0.0)
    (_, ship) = book.computed(KEY, [5, 6, 9], 0.0, layers=Layers(4, DEEP))
    assert isinstance(ship, Ship)
    instructions = book.shipped(KEY, ship.ship_id, 8, 3, 1.0)
    assert kinds(instructions) == ["Release", "Refuse", "Failed"]


@pytest.mark.parametrize(
    ("blocks", "done"), [([5], 4), ([5, 9], 4), ([5, 6, 9], 4), ([5, 6], 3), ([5, 6], 2), ([5, 6, 7, 8], 4)]
)
def test_layers_that_do_not_follow(book: LeaseBook, blocks: list[int], done: int) -> None:
    tell(book, [5, 6], 3)
    with pytest.raises(InvariantViolation, match="r/0"):
        tell(book, blocks, done)


def test_blocks_that_do_not_complete_what_was_begun(book: LeaseBook) -> None:
    tell(book, [5, 6], 3)
    with pytest.raises(InvariantViolation, match=r"None of blocks \(9,\)"):
        book.computed(KEY, [9], 0.0)
    with pytest.raises(InvariantViolation, match="0 of 3"):
        book.finished(KEY, 3, 0.0)


@pytest.mark.parametrize("done", [-1, 0, 8, 9])
def test_layers_are_some_and_not_all(done: int) -> None:
    with pytest.raises(InvariantViolation, match=f"got {done}"):
        Layers(done, DEEP)


def test_a_lease_of_whole_blocks_is_as_it_was(book: LeaseBook) -> None:
    book.grant(READER, grant(), 0.0)
    (_, ship) = book.computed(KEY, [5, 6, 9], 0.0)
    assert isinstance(ship, Ship)
    assert (ship.layers, ship.finishes, ship.layout) == (None, 3, LAYOUT)
    assert kinds(book.finished(KEY, 3, 0.0)) == ["Handover"]
    assert report(book, ship, 1.0) == []
