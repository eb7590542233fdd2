"""The lease book: what ships, what is refused, and when a lease expires."""

from __future__ import annotations

import math

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
    of_block_size,
    opened,
    refusals,
    report,
    shipping,
)

from kv_transfer.instructions import Failed, Hold, Release, Send, Ship
from kv_transfer.lease import LeaseBook
from kv_transfer.parking import Parking
from kv_transfer.tombstones import Tombstones
from protocol.errors import (
    ConfigError,
    IllegalTransition,
    InvalidRequest,
    InvariantViolation,
)
from protocol.ids import Peer, RequestKey
from protocol.messages import ErrorInfo, Grant, Handover, Renew, Settle


@pytest.fixture
def book() -> LeaseBook:
    return LeaseBook()


class TestShipping:
    def test_chunks_ship_as_they_are_computed(self, book: LeaseBook) -> None:
        opened(book)
        book.grant(READER, grant(), 1.0)
        assert book.computed(KEY, [5, 6], 2.0) == [
            Hold(KEY, (5, 6)),
            Ship(KEY, 0, ("inproc://d",), TICKET, LAYOUT, (5, 6), (21, 22), (121, 122), range(8)),
        ]
        assert book.computed(KEY, [9], 3.0) == [
            Hold(KEY, (9,)),
            Ship(KEY, 1, ("inproc://d",), TICKET, LAYOUT, (9,), (23,), (123,), range(8, 10)),
        ]
        book.check_integrity()

    @pytest.mark.parametrize(
        ("size", "first", "blocks", "chunks"),
        [
            # Ten tokens in blocks of four here; of two, eight, three and sixteen there.
            (2, 0, 5, [((5,), range(4), 2), ((6,), range(4, 8), 2), ((9,), range(8, 10), 1)]),
            (2, 3, 2, [None, ((6,), range(6, 8), 1), ((9,), range(8, 10), 1)]),
            (8, 0, 2, [None, ((5, 6), range(8), 1), ((9,), range(8, 10), 1)]),
            (3, 0, 4, [((5,), range(3), 1), ((5, 6), range(3, 6), 1), ((6, 9), range(6, 10), 2)]),
            (16, 0, 1, [None, None, ((5, 6, 9), range(10), 1)]),
            (16, 1, 0, [None, None, None]),
        ],
    )
    def test_ships_are_whole_blocks_of_the_readers_size(
        self,
        book: LeaseBook,
        size: int,
        first: int,
        blocks: int,
        chunks: list[tuple[tuple[int, ...], range, int] | None],
    ) -> None:
        opened(book)
        layout = of_block_size(size)
        wanted = tuple(range(40, 40 + blocks))
        assert book.grant(READER, grant(first, wanted, layout, wire_dtype="bfloat16"), 0.0) == []
        ships, targets = [], []
        for block, chunk in zip((5, 6, 9), chunks, strict=True):
            found = [each for each in book.computed(KEY, [block], 0.0) if isinstance(each, Ship)]
            book.check_integrity()
            assert [(each.source_blocks, each.tokens, len(each.target_blocks)) for each in found] == (
                [chunk] if chunk else []
            )
            ships += found
            targets += [block for each in found for block in each.target_blocks]
        assert tuple(targets) == wanted
        assert all(each.wire.block_bytes == layout.block_bytes // 2 for each in ships)
        (send,) = book.finished(KEY, 3, 0.0)
        for ship in ships:
            count = len(ship.target_blocks)
            assert book.shipped(KEY, ship.ship_id, count * ship.wire.block_bytes, count, 0.0) == []
            book.check_integrity()
        assert isinstance(send, Send)
        assert isinstance(send.message, Handover)
        assert (send.message.blocks, send.message.nbytes) == (blocks, blocks * layout.block_bytes // 2)

    def test_nothing_ships_before_the_grant_and_all_of_it_then(self, book: LeaseBook) -> None:
        opened(book)
        assert book.computed(KEY, [5, 6], 1.0) == [Hold(KEY, (5, 6))]
        (ship,) = book.grant(READER, grant(), 2.0)
        assert isinstance(ship, Ship)
        assert (ship.source_blocks, ship.target_blocks) == ((5, 6), (21, 22))

    def test_a_grant_before_the_request_is_attached(self, book: LeaseBook) -> None:
        assert book.grant(READER, grant(), 0.0) == []
        opened(book, 1.0)
        assert kinds(book.computed(KEY, [5], 2.0)) == ["Hold", "Ship"]
        assert book.deadline() == 1.0 + TTL

    @pytest.mark.parametrize("first_block", [0, 1, 2, 3])
    def test_only_wanted_blocks_ship(self, book: LeaseBook, first_block: int) -> None:
        opened(book)
        wanted = (21, 22, 23)[first_block:]
        book.grant(READER, grant(first_block, wanted), 0.0)
        ships = []
        for block in (5, 6, 9):
            ships += [each for each in book.computed(KEY, [block], 0.0) if isinstance(each, Ship)]
        assert [each.source_blocks[0] for each in ships] == [5, 6, 9][first_block:]
        assert [each.target_blocks[0] for each in ships] == list(wanted)
        assert [each.generations[0] for each in ships] == [100 + block for block in wanted]
        (send,) = book.finished(KEY, 3, 1.0)
        for ship in ships:
            assert report(book, ship, 2.0) == []
        assert isinstance(send, Send)
        assert isinstance(send.message, Handover)
        assert (send.message.blocks, send.message.nbytes) == (len(wanted), len(wanted) * LAYOUT.block_bytes)

    def test_a_full_hit_granted_after_the_end_is_handed_over_at_once(self, book: LeaseBook) -> None:
        opened(book)
        book.computed(KEY, [5, 6, 9], 0.0)
        assert book.finished(KEY, 3, 1.0) == []
        assert kinds(book.grant(READER, grant(3, ()), 2.0)) == ["Handover"]

    @pytest.mark.parametrize("reported", [0, 1, 2])
    def test_the_handover_waits_for_no_ship_and_tells_what_they_carry(self, book: LeaseBook, reported: int) -> None:
        ships = shipping(book)
        for ship in ships[:reported]:
            assert report(book, ship, 3.0) == []
        size = 3 * LAYOUT.block_bytes
        handover = Handover(key=KEY, num_tokens=10, next_token=3, blocks=3, nbytes=size, ticket=TICKET)
        assert book.finished(KEY, 3, 4.0) == [Send(READER, handover)]
        for ship in ships[reported:]:
            assert report(book, ship, 5.0) == []
        book.check_integrity()

    def test_a_grant_after_the_end_ships_and_hands_over_at_once(self, book: LeaseBook) -> None:
        opened(book)
        book.computed(KEY, [5, 6, 9], 0.0)
        assert book.finished(KEY, 3, 1.0) == []
        (ship, send) = book.grant(READER, grant(), 3.5)
        assert isinstance(ship, Ship)
        assert isinstance(send, Send)
        assert isinstance(send.message, Handover)
        assert send.message.tail == 2.5

    def test_settling_releases_once(self, book: LeaseBook) -> None:
        handed_over(book)
        assert book.settle(READER, Settle(key=KEY), 1.0) == [Release(KEY)]
        assert book.settle(READER, Settle(key=KEY), 1.0) == []
        assert book.abort(READER, ABORT, 1.0) == []
        assert book.cancel(KEY, 1.0) == []
        assert (book.open_count, book.deadline()) == (0, None)

    def test_settling_early_changes_nothing(self, book: LeaseBook) -> None:
        shipping(book)
        assert book.settle(READER, Settle(key=KEY), 1.0) == []
        assert book.is_open(KEY)


class TestRefusals:
    @pytest.mark.parametrize(
        ("wrong", "code"),
        [
            (grant(0, (21, 22)), "integrity_mismatch"),
            (grant(1, (21, 22, 23)), "integrity_mismatch"),
            (grant(generations=(1, 2)), "integrity_mismatch"),
            (grant(0, (21, 21, 23)), "integrity_mismatch"),
            (grant(0, (0, 21, 23)), "integrity_mismatch"),
            (grant(layout=of_block_size(8)), "integrity_mismatch"),
            (grant(0, (21, 22), layout=of_block_size(2)), "integrity_mismatch"),
        ],
    )
    def test_a_grant_that_does_not_fit(self, book: LeaseBook, wrong: Grant, code: str) -> None:
        opened(book)
        assert refusals(book.grant(READER, wrong, 0.0)) == [code]
        assert kinds(book.computed(KEY, [5], 0.0)) == ["Hold"]
        assert kinds(book.grant(READER, grant(), 1.0)) == ["Ship"]

    def test_a_second_grant_does_not_replace_the_first(self, book: LeaseBook) -> None:
        shipping(book)
        assert refusals(book.grant(READER, grant(0, (31, 32, 33), ticket=b"u" * 16), 1.0)) == ["lease_refused"]
        assert book.grant(READER, grant(), 2.0) == [], "the same grant again is a sign of life"
        assert book.deadline() == 2.0 + TTL
        book.check_integrity()

    @pytest.mark.parametrize("stranger", [STALE, Peer("decode-0", 8), Peer("decode-1", 7)])
    def test_another_incarnation_changes_nothing(self, book: LeaseBook, stranger: Peer) -> None:
        handed_over(book)
        before = book.deadline()
        assert refusals(book.grant(stranger, grant(), 5.0), stranger) == ["lease_refused"]
        assert refusals(book.renew(stranger, Renew(key=KEY, ttl=TTL), 5.0), stranger) == ["lease_refused"]
        assert book.settle(stranger, Settle(key=KEY), 5.0) == []
        assert book.abort(stranger, ABORT, 5.0) == []
        assert book.reader_lost(stranger, 5.0) == []
        assert book.deadline() == before
        assert book.is_open(KEY)

    def test_a_parked_grant_of_another_incarnation(self, book: LeaseBook) -> None:
        book.grant(STALE, grant(0, (31, 32, 33)), 0.0)
        book.grant(READER, grant(), 0.0)
        assert refusals(book.open(KEY, READER, ROUTER, 10, 4, TTL, 1.0), STALE) == ["lease_refused"]
        (_, ship) = book.computed(KEY, [5], 1.0)
        assert isinstance(ship, Ship)
        assert ship.target_blocks == (21,)

    def test_a_grant_of_an_ended_key(self, book: LeaseBook) -> None:
        handed_over(book)
        book.settle(READER, Settle(key=KEY), 1.0)
        assert refusals(book.grant(READER, grant(), 2.0)) == ["lease_refused"]
        assert refusals(book.renew(READER, Renew(key=KEY, ttl=TTL), 2.0)) == ["lease_refused"]

    def test_parking_is_bounded_and_expires(self) -> None:
        book = LeaseBook(Parking(capacity=1, ttl=10.0))
        other = RequestKey("s", 0)
        assert book.grant(READER, grant(), 0.0) == []
        assert refusals(book.grant(READER, grant(key=other), 0.0)) == ["lease_refused"]
        assert refusals(book.grant(READER, grant(ticket=b"u" * 16), 0.0)) == ["lease_refused"]
        assert book.deadline() == 10.0
        assert book.tick(9.9) == []
        assert refusals(book.tick(10.0)) == ["lease_expired"]
        assert book.deadline() is None
        assert book.grant(READER, grant(key=other), 11.0) == []

    def test_a_grant_of_an_unknown_key_is_answered_in_time(self, book: LeaseBook) -> None:
        book.grant(READER, grant(ttl=5.0), 0.0)
        assert refusals(book.tick(5.0)) == ["lease_expired"]


class TestExpiry:
    def test_a_long_queue_expires_nothing(self, book: LeaseBook) -> None:
        opened(book)
        assert book.deadline() is None
        assert book.tick(1e6) == []
        book.computed(KEY, [5, 6, 9], 1e6)
        assert book.deadline() is None
        book.finished(KEY, 3, 1e6)
        assert book.deadline() == 1e6 + TTL

    def test_without_a_sign_it_counts_from_the_end_of_prefill(self, book: LeaseBook) -> None:
        opened(book)
        book.computed(KEY, [5, 6, 9], 50.0)
        book.finished(KEY, 3, 50.0)
        assert book.tick(79.9) == []
        instructions = book.tick(80.0)
        assert kinds(instructions) == ["Release", "Refuse", "Failed"]
        assert refusals(instructions) == ["lease_expired"]
        failed = instructions[-1]
        assert isinstance(failed, Failed)
        assert (failed.error.code, failed.router) == ("lease_expired", ROUTER)
        assert book.tick(200.0) == []

    def test_a_reader_that_goes_silent_in_mid_prefill(self, book: LeaseBook) -> None:
        opened(book)
        book.renew(READER, Renew(key=KEY, ttl=TTL), 10.0)
        book.computed(KEY, [5], 30.0)
        assert kinds(book.tick(40.0)) == ["Release", "Refuse", "Failed"]
        assert book.computed(KEY, [6], 41.0) == []
        assert book.finished(KEY, 3, 41.0) == []

    def test_renewals_keep_a_lease_without_a_grant(self, book: LeaseBook) -> None:
        opened(book)
        book.computed(KEY, [5, 6, 9], 0.0)
        book.finished(KEY, 3, 0.0)
        for now in range(10, 200, 10):
            assert book.renew(READER, Renew(key=KEY, ttl=TTL), float(now)) == []
            assert book.tick(float(now)) == []
        assert kinds(book.grant(READER, grant(), 200.0)) == ["Ship", "Handover"]

    def test_a_renewal_is_answered_while_the_prompt_is_not_computed(self, book: LeaseBook) -> None:
        opened(book)
        renewal = Renew(key=KEY, ttl=TTL)
        assert book.renew(READER, renewal, 1.0) == [Send(READER, renewal)]
        book.grant(READER, grant(), 1.0)
        assert book.renew(READER, renewal, 2.0) == [Send(READER, renewal)]
        book.computed(KEY, [5, 6, 9], 3.0)
        book.finished(KEY, 3, 3.0)
        assert book.renew(READER, renewal, 4.0) == []

    @pytest.mark.parametrize("ttl", [math.nan, math.inf, 1e9])
    def test_a_reader_cannot_stretch_a_lease(self, book: LeaseBook, ttl: float) -> None:
        opened(book)
        book.renew(READER, Renew(key=KEY, ttl=ttl), 1.0)
        assert book.deadline() == 1.0 + TTL

    def test_after_the_handover_the_router_hears_nothing(self, book: LeaseBook) -> None:
        handed_over(book)
        assert kinds(book.tick(TTL)) == ["Release", "Refuse"]


class TestMisuse:
    @pytest.mark.parametrize(
        ("tokens", "ttl", "field"), [(0, TTL, "num_tokens"), (1, 0.0, "ttl"), (1, math.nan, "ttl")]
    )
    def test_bad_input_is_named(self, book: LeaseBook, tokens: int, ttl: float, field: str) -> None:
        with pytest.raises(InvalidRequest, match=field) as caught:
            book.open(KEY, READER, ROUTER, tokens, 4, ttl, 0.0)
        assert caught.value.field == field
        assert not book.is_open(KEY)

    def test_opened_twice(self, book: LeaseBook) -> None:
        opened(book)
        with pytest.raises(InvariantViolation, match="r/0 is open already"):
            opened(book)

    def test_more_blocks_than_the_prompt_has(self, book: LeaseBook) -> None:
        opened(book)
        with pytest.raises(InvariantViolation, match="3 blocks"):
            book.computed(KEY, [1, 2, 3, 4], 0.0)

    def test_finished_too_early_or_twice(self, book: LeaseBook) -> None:
        opened(book)
        with pytest.raises(InvariantViolation, match="0 of 3"):
            book.finished(KEY, 3, 0.0)
        book.computed(KEY, [1, 2, 3], 0.0)
        book.finished(KEY, 3, 0.0)
        with pytest.raises(IllegalTransition, match="FINISH is illegal in COMPUTING -FINISH-> COMPUTED"):
            book.finished(KEY, 3, 0.0)

    @pytest.mark.parametrize("tokens", [1, 3, 4])
    def test_a_prompt_of_one_block(self, book: LeaseBook, tokens: int) -> None:
        book.open(KEY, READER, ROUTER, tokens, 4, TTL, 0.0)
        book.grant(READER, grant(0, (21,)), 0.0)
        (_, ship) = book.computed(KEY, [5], 0.0)
        assert isinstance(ship, Ship)
        assert kinds(book.finished(KEY, 3, 0.0)) == ["Handover"]

    @pytest.mark.parametrize("make", [Tombstones, Parking])
    def test_bounds_must_be_above_zero(self, make: type[Tombstones | Parking]) -> None:
        with pytest.raises(ConfigError, match="capacity must be above 0, got 0"):
            make(capacity=0)
        with pytest.raises(ConfigError, match="ttl"):
            make(ttl=math.nan)


class TestTombstones:
    def test_the_oldest_gives_way(self) -> None:
        graves = Tombstones(capacity=2)
        keys = [RequestKey("r", attempt) for attempt in range(3)]
        for key in keys:
            graves.bury(key, ABORT.error, 0.0)
        assert [graves.find(key, 1.0) is not None for key in keys] == [False, True, True]
        assert len(graves) == 2

    def test_one_is_forgotten_in_time_and_the_first_word_stands(self) -> None:
        graves = Tombstones(ttl=10.0)
        graves.bury(KEY, ABORT.error, 0.0)
        graves.bury(KEY, ErrorInfo(code="lease_refused", message="other"), 5.0)
        assert graves.find(KEY, 9.9) == ABORT.error
        assert graves.find(KEY, 10.0) is None
