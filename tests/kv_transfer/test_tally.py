"""The tally, fed by real books."""

from __future__ import annotations

import pytest
from lease_cases import ABORT, KEY, LAYOUT, READER, ROUTER, TTL, grant, kinds, report

from kv_transfer.imports import ImportBook
from kv_transfer.instructions import Instruction, Ship
from kv_transfer.lease import LeaseBook
from kv_transfer.tally import Tally
from kv_transfer.transport import ShipReport
from protocol.errors import ChannelLost, IntegrityMismatch
from protocol.histogram import Histogram
from protocol.ids import Peer, RequestKey
from protocol.messages import ErrorInfo, PrefillAddress, Refuse, Renew, Settle
from protocol.transfer_counts import SCALES, Outcome, TransferCounts

PREFILL = PrefillAddress(peer=Peer("prefill-0", 3), endpoint="tcp://p")
TICKET = b"t" * 16


class Side:
    """A book's instructions, and the tally that reads them."""

    def __init__(self) -> None:
        self.tally = Tally()

    def took(self, instructions: list[Instruction], outcome: Outcome = "broken", now: float = 0.0) -> list[Instruction]:
        self.tally.asked(instructions, outcome, now)
        return instructions

    @property
    def counts(self) -> TransferCounts:
        return self.tally.counts()


def leased(side: Side) -> LeaseBook:
    book = LeaseBook()
    side.took(book.open(KEY, READER, ROUTER, 10, 4, TTL, 0.0))
    side.tally.opened(KEY, 0.0)
    return book


def granted(side: Side, book: LeaseBook) -> list[Ship]:
    instructions = book.grant(READER, grant(), 0.2)
    side.tally.granted(KEY, 0.2)
    instructions += book.computed(KEY, [5, 6, 9], 0.3)
    return [each for each in side.took(instructions, now=0.3) if isinstance(each, Ship)]


def imported(side: Side) -> ImportBook:
    book = ImportBook()
    side.took(
        book.open(KEY, PREFILL, 0, (21, 22, 23), (1, 1, 1), 10, LAYOUT, ("inproc://d",), TICKET, TTL, 0.0), now=0.0
    )
    side.tally.opened(KEY, 0.0)
    return book


def where(histogram: Histogram, name: str) -> float:
    """Upper bound of the one bucket that has the one value."""
    assert histogram.count == 1
    return SCALES[name].bounds[histogram.counts.index(1)]


@pytest.mark.parametrize("overtaken", [False, True])
def test_a_lease_from_opening_to_settlement(*, overtaken: bool) -> None:
    side = Side()
    book = leased(side)
    assert (side.counts.opened, side.counts.open) == (1, 1)
    (ship,) = granted(side, book)
    side.tally.granted(KEY, 0.39)
    side.tally.opened(KEY, 0.39)
    side.tally.ships_by(KEY, "tcp")
    side.took(book.finished(KEY, 7, 0.4), now=0.4)
    if overtaken:
        side.took(book.settle(READER, Settle(key=KEY), 0.4075), "settled", 0.4075)
        assert side.counts.draining == 1
    side.tally.shipped("tcp", ShipReport(nbytes=6000, spans=3, seconds=0.002))
    side.took(report(book, ship, 0.4), now=0.4)
    side.took(book.settle(READER, Settle(key=KEY), 0.4075), "settled", 0.4075)
    counts = side.counts
    assert (counts.opened, counts.open, counts.draining, counts.ended) == (1, 0, 0, {"settled": 1})
    (path,) = counts.paths.values()
    assert list(counts.paths) == ["tcp"]
    assert where(path.grant_wait, "grant_wait") == 0.25
    assert where(path.ship_seconds, "ship_seconds") == 0.0025
    assert (path.ship_seconds.total, path.ship_bytes.total, path.ship_spans.total) == (0.002, 6000, 3)
    assert where(path.ship_spans, "ship_spans") == 4
    assert where(path.ship_rate, "ship_rate") == 5e6
    assert path.ship_rate.total == 3e6
    assert where(path.settle, "settle") == 0.01
    assert counts.refusals == path.broken == {}


def test_a_second_settlement_or_cancel_counts_nothing() -> None:
    side = Side()
    book = leased(side)
    side.took(book.cancel(KEY, 1.0), "cancelled")
    before = side.counts
    side.took(book.cancel(KEY, 1.0), "cancelled")
    side.took(book.settle(READER, Settle(key=KEY), 1.0), "settled")
    side.took(book.tick(1e6), "expired")
    assert side.counts == before
    assert before.ended == {"cancelled": 1}
    assert before.paths == {}, "a lease that never had a grant waited for nothing that came"


def test_a_lease_that_drains_is_neither_open_nor_gone() -> None:
    side = Side()
    book = leased(side)
    (ship,) = granted(side, book)
    side.took(book.abort(READER, ABORT, 1.0), "aborted", 1.0)
    assert (side.counts.open, side.counts.draining, side.counts.ended) == (0, 1, {"aborted": 1})
    side.tally.ship_broke(KEY, "tcp", ChannelLost.code)
    side.took(book.ship_failed(KEY, ship.ship_id, ChannelLost("stopped"), 1.1))
    assert (side.counts.open, side.counts.draining, side.counts.ended) == (0, 0, {"aborted": 1})
    assert "tcp" not in side.counts.paths, "a ship that was stopped on purpose is not a broken one"


def test_a_broken_ship_ends_its_lease() -> None:
    side = Side()
    book = leased(side)
    (ship,) = granted(side, book)
    side.tally.ship_broke(KEY, "tcp", IntegrityMismatch.code)
    instructions = book.ship_failed(KEY, ship.ship_id, IntegrityMismatch("a checksum"), 1.0)
    assert kinds(side.took(instructions)) == ["Release", "Refuse", "Failed"]
    assert side.counts.ended == {"broken": 1}
    assert side.counts.paths["tcp"].broken == {"integrity_mismatch": 1}
    assert side.counts.refusals == {}, "the reader was told of the end: nothing of its was refused"


def test_refusals_are_answers_to_what_has_no_lease() -> None:
    side = Side()
    book = leased(side)
    side.took(book.tick(0.0), "expired")
    side.took(book.cancel(KEY, 1.0), "cancelled")
    side.took(book.grant(READER, grant(), 1.1))
    side.took(book.renew(READER, Renew(key=KEY, ttl=TTL), 1.2))
    assert side.counts.refusals == {"lease_refused": 2}
    early = RequestKey("early", 0)
    side.took(book.grant(READER, grant(key=early), 2.0))
    side.took(book.tick(1e6), "expired")
    assert side.counts.refusals == {"lease_refused": 2, "lease_expired": 1}
    assert side.counts.ended == {"cancelled": 1}


def test_an_import_that_waits_and_is_cancelled() -> None:
    side = Side()
    book = ImportBook()
    side.took(book.waiting(KEY, PREFILL, TTL, 0.0))
    side.tally.opened(KEY, 0.0)
    assert side.counts.open == 1
    side.took(book.cancel(KEY, 1.0), "cancelled")
    assert (side.counts.opened, side.counts.open, side.counts.draining) == (1, 0, 0)
    assert side.counts.ended == {"cancelled": 1}


def test_an_import_whose_worker_was_replaced_while_it_waited() -> None:
    side = Side()
    book = ImportBook()
    side.took(book.waiting(KEY, PREFILL, TTL, 0.0))
    side.tally.opened(KEY, 0.0)
    side.took(book.prefill_lost(PREFILL.peer, 1.0), "lost")
    assert side.counts.ended == {"lost": 1}


def test_a_refused_import_drains_until_its_window_is_quiet() -> None:
    side = Side()
    book = imported(side)
    refuse = Refuse(key=KEY, error=ErrorInfo.of(ChannelLost("gone")))
    side.took(book.refuse(PREFILL.peer, refuse, 1.0), "refused")
    assert (side.counts.open, side.counts.draining, side.counts.ended) == (0, 1, {"refused": 1})
    side.took(book.quiesced(TICKET, 1.1), "settled")
    assert (side.counts.open, side.counts.draining, side.counts.ended) == (0, 0, {"refused": 1})


def test_an_import_that_expires() -> None:
    side = Side()
    book = imported(side)
    side.took(book.tick(TTL + 1.0), "expired")
    side.took(book.quiesced(TICKET, TTL + 1.1), "settled")
    assert side.counts.ended == {"expired": 1}
    assert (side.counts.opened, side.counts.open, side.counts.draining) == (1, 0, 0)
