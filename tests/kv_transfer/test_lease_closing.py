"""The lease book: every way a lease ends, early, once, and with ships in flight."""

from __future__ import annotations

import pytest
from lease_cases import (
    ABORT,
    KEY,
    LAYOUT,
    READER,
    ROUTER,
    STALE,
    TICKET,
    TTL,
    grant,
    handed_over,
    kinds,
    opened,
    refusals,
    report,
    shipping,
)

from kv_transfer.instructions import Failed, Instruction, Quarantine, Release, Ship, StopShips
from kv_transfer.lease import LeaseBook
from protocol.errors import (
    ChannelLost,
    EngineFailure,
)
from protocol.ids import RequestKey
from protocol.messages import Settle


@pytest.fixture
def book() -> LeaseBook:
    return LeaseBook()


class TestClosing:
    """Every way a lease can close while ships are in flight."""

    def closings(self, book: LeaseBook, way: str) -> list[Instruction]:
        if way == "cancel":
            return book.cancel(KEY, 1.0)
        if way == "abort":
            return book.abort(READER, ABORT, 1.0)
        if way == "expire":
            return book.tick(TTL)
        if way == "reader_lost":
            return book.reader_lost(READER, 1.0)
        return book.fail(KEY, EngineFailure("step raised"), 1.0)

    WAYS = (
        ("cancel", ["Refuse"]),
        ("abort", []),
        ("expire", ["Refuse", "Failed"]),
        ("reader_lost", ["Failed"]),
        ("fail", ["Refuse", "Failed"]),
    )

    @pytest.mark.parametrize(("way", "told"), WAYS)
    def test_with_nothing_in_flight(self, book: LeaseBook, way: str, told: list[str]) -> None:
        opened(book)
        book.grant(READER, grant(), 0.0)
        assert kinds(self.closings(book, way)) == ["Release", *told]
        assert self.closings(book, way) == []
        assert book.open_count == 0

    @pytest.mark.parametrize(("way", "told"), WAYS)
    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_blocks_drain_until_the_last_ship_has_reported(
        self, book: LeaseBook, way: str, told: list[str], order: tuple[int, int]
    ) -> None:
        ships = shipping(book)
        instructions = self.closings(book, way)
        assert instructions[:2] == [StopShips(KEY, TICKET), Quarantine(KEY)]
        assert kinds(instructions[2:]) == told
        assert (book.open_count, book.is_open(KEY), book.deadline()) == (1, False, None)
        assert book.tick(1e9) == [], "never on time alone"
        for again in (way for way, _ in self.WAYS):
            assert self.closings(book, again) == []
        assert book.open(KEY, READER, ROUTER, 10, 4, TTL, 2.0) == []
        book.check_integrity()
        assert report(book, ships[order[0]], 2.0) == []
        assert book.ship_failed(KEY, ships[order[1]].ship_id, ChannelLost("aborted"), 2.0) == [Release(KEY)]
        assert book.open_count == 0

    def test_one_of_several_ships_fails_and_the_others_are_slow(self, book: LeaseBook) -> None:
        opened(book)
        book.grant(READER, grant(), 0.0)
        ships = [each for block in (5, 6, 9) for each in book.computed(KEY, [block], 0.0) if isinstance(each, Ship)]
        instructions = book.ship_failed(KEY, ships[1].ship_id, ChannelLost("reset"), 1.0)
        assert kinds(instructions) == ["StopShips", "Quarantine", "Refuse", "Failed"]
        assert report(book, ships[0], 2.0) == []
        assert report(book, ships[2], 3.0) == [Release(KEY)]

    def test_a_ship_that_fails_twice_is_cleaned_once(self, book: LeaseBook) -> None:
        first, second = shipping(book)
        assert kinds(book.ship_failed(KEY, first.ship_id, ChannelLost("post"), 1.0))[:2] == ["StopShips", "Quarantine"]
        assert book.ship_failed(KEY, first.ship_id, ChannelLost("poll"), 1.0) == []
        assert book.open_count == 1
        assert report(book, second, 2.0) == [Release(KEY)]
        assert report(book, second, 2.0) == []

    @pytest.mark.parametrize("finished", [False, True])
    def test_the_last_ship_fails(self, book: LeaseBook, *, finished: bool) -> None:
        first, second = shipping(book)
        report(book, first, 1.0)
        if finished:
            assert kinds(book.finished(KEY, 3, 1.0)) == ["Handover"]
        instructions = book.ship_failed(KEY, second.ship_id, ChannelLost("reset"), 1.0)
        assert kinds(instructions) == ["Release", "Refuse", "Failed"]
        # Perhaps only its answer was lost: from the hand-over on the reader alone knows.
        assert isinstance(instructions[2], Failed)
        assert instructions[2].handed_over == finished
        assert refusals(instructions) == ["channel_lost"]

    def test_a_ship_that_wrote_fewer_blocks(self, book: LeaseBook) -> None:
        first, second = shipping(book)
        report(book, second, 1.0)
        instructions = book.shipped(KEY, first.ship_id, LAYOUT.block_bytes, 1, 1.0)
        assert refusals(instructions) == ["integrity_mismatch"]
        assert instructions[0] == Release(KEY)

    def test_ships_that_wrote_other_bytes_than_were_handed_over(self, book: LeaseBook) -> None:
        first, second = shipping(book)
        book.finished(KEY, 3, 1.0)
        assert report(book, second, 1.0) == []
        instructions = book.shipped(KEY, first.ship_id, LAYOUT.block_bytes, 2, 1.0)
        assert kinds(instructions) == ["Release", "Refuse", "Failed"]
        assert refusals(instructions) == ["integrity_mismatch"]

    @pytest.mark.parametrize("answered", [True, False])
    def test_a_settlement_that_overtakes_the_last_answer(self, book: LeaseBook, *, answered: bool) -> None:
        first, second = shipping(book)
        book.finished(KEY, 3, 1.0)
        report(book, first, 1.0)
        assert book.settle(READER, Settle(key=KEY), 1.0) == [Quarantine(KEY)], "what landed need not be stopped"
        assert (book.open_count, book.is_open(KEY), book.deadline()) == (1, False, None)
        assert book.settle(READER, Settle(key=KEY), 1.0) == book.cancel(KEY, 1.0) == []
        lost = ChannelLost("after it had landed")
        ended = report(book, second, 2.0) if answered else book.ship_failed(KEY, second.ship_id, lost, 2.0)
        assert ended == [Release(KEY)]
        assert book.open_count == 0

    def test_a_cancel_after_the_handover(self, book: LeaseBook) -> None:
        assert kinds(handed_over(book)) == ["Handover"]
        assert kinds(book.cancel(KEY, 1.0)) == ["Release", "Refuse"]


class TestEarlyEnds:
    def test_a_cancel_before_the_request(self, book: LeaseBook) -> None:
        assert book.cancel(KEY, 0.0) == []
        assert book.open(KEY, READER, ROUTER, 10, 4, TTL, 1.0) == []
        assert not book.is_open(KEY)
        assert refusals(book.grant(READER, grant(), 2.0)) == ["lease_refused"]

    def test_a_cancel_refuses_a_parked_grant(self, book: LeaseBook) -> None:
        book.grant(READER, grant(), 0.0)
        assert refusals(book.cancel(KEY, 1.0)) == ["lease_refused"]
        assert book.deadline() is None

    def test_an_abort_before_the_request(self, book: LeaseBook) -> None:
        book.grant(READER, grant(), 0.0)
        assert book.abort(READER, ABORT, 0.5) == []
        assert book.open(KEY, READER, ROUTER, 10, 4, TTL, 1.0) == []
        assert not book.is_open(KEY)

    def test_an_early_abort_of_a_stranger_changes_nothing(self, book: LeaseBook) -> None:
        book.abort(STALE, ABORT, 0.5)
        opened(book, 1.0)
        assert book.is_open(KEY)

    def test_an_abort_that_overtakes_its_grant(self, book: LeaseBook) -> None:
        book.abort(READER, ABORT, 0.0)
        assert refusals(book.grant(READER, grant(), 0.5)) == ["lease_refused"]
        opened(book, 1.0)
        assert not book.is_open(KEY)

    def test_a_lost_reader_takes_its_parked_grants_along(self, book: LeaseBook) -> None:
        book.grant(READER, grant(), 0.0)
        assert book.reader_lost(READER, 0.5) == []
        opened(book, 1.0)
        assert kinds(book.computed(KEY, [5], 1.0)) == ["Hold"]

    def test_another_attempt_is_another_lease(self, book: LeaseBook) -> None:
        book.cancel(KEY, 0.0)
        second = RequestKey("r", 1)
        book.open(second, READER, ROUTER, 10, 4, TTL, 1.0)
        assert refusals(book.grant(READER, grant(), 1.0)) == ["lease_refused"]
        assert book.abort(READER, ABORT, 1.0) == []
        assert book.is_open(second)
