"""The import book: each transition, and each fault that the decode side of a handoff must survive."""

from __future__ import annotations

import itertools
import math

import pytest

from kv_transfer.imports import ImportBook
from kv_transfer.instructions import (
    CloseWindow,
    Commit,
    Failed,
    FreeBlocks,
    Instruction,
    OpenWindow,
    Quarantine,
    Send,
)
from protocol.errors import (
    ChannelLost,
    IllegalTransition,
    InvalidRequest,
    InvariantViolation,
    LeaseRefused,
    WorkerDraining,
)
from protocol.ids import Peer, RequestKey
from protocol.layout import KVLayout
from protocol.messages import Abort, ErrorInfo, Grant, Handover, PrefillAddress, Refuse, Renew, Settle

KEY = RequestKey("r", 0)
PREFILL = PrefillAddress(peer=Peer("prefill-0", 4), endpoint="tcp://p:1")
STALE = Peer("prefill-0", 3)
LAYOUT = KVLayout(num_layers=2, kv_heads=2, head_dim=4, block_size=4, dtype="float32")
SIZE = LAYOUT.block_bytes
TICKET = b"t" * 16
TTL = 30.0
HANDOVER = Handover(key=KEY, num_tokens=10, next_token=3, blocks=3, nbytes=3 * SIZE, ticket=TICKET)
REFUSAL = Refuse(key=KEY, error=ErrorInfo.of(LeaseRefused("gone")))
RENEWAL = Send(PREFILL.peer, Renew(key=KEY, ttl=TTL), PREFILL.endpoint)


def opened(
    book: ImportBook,
    now: float = 0.0,
    key: RequestKey = KEY,
    first_block: int = 0,
    blocks: tuple[int, ...] = (21, 22, 23),
    ticket: bytes = TICKET,
    ttl: float = TTL,
) -> list[Instruction]:
    generations = tuple(100 + block for block in blocks)
    return book.open(
        key,
        PREFILL,
        first_block,
        blocks,
        generations,
        10,
        LAYOUT,
        ("inproc://d",),
        ticket,
        ttl,
        now,
        router=b"router-0",
    )


def kinds(instructions: list[Instruction]) -> list[str]:
    return [type(each.message if isinstance(each, Send) else each).__name__ for each in instructions]


def failures(instructions: list[Instruction]) -> list[str]:
    return [each.error.code for each in instructions if isinstance(each, Failed)]


@pytest.fixture
def book() -> ImportBook:
    return ImportBook()


class TestImporting:
    def test_opening_grants_what_is_reserved(self, book: ImportBook) -> None:
        assert opened(book) == [
            OpenWindow(KEY, TICKET, (21, 22, 23), (121, 122, 123), PREFILL.peer),
            Send(
                PREFILL.peer,
                Grant(
                    key=KEY,
                    first_block=0,
                    blocks=(21, 22, 23),
                    generations=(121, 122, 123),
                    layout=LAYOUT,
                    addresses=("inproc://d",),
                    ticket=TICKET,
                    ttl=TTL,
                ),
                PREFILL.endpoint,
            ),
        ]
        book.check_integrity()

    @pytest.mark.parametrize("order", list(itertools.permutations(["first", "second", "handover"])))
    def test_landings_and_handover_in_any_order(self, book: ImportBook, order: tuple[str, ...]) -> None:
        opened(book)
        events = {
            "first": lambda: book.landed(TICKET, 2, 2 * SIZE, 1.0, seconds=0.5, transport="tcp"),
            "second": lambda: book.landed(TICKET, 1, SIZE, 1.0, seconds=0.25, transport="tcp"),
            "handover": lambda: book.handover(PREFILL.peer, HANDOVER, 1.0),
        }
        results = []
        for name in order:
            results.append(events[name]())
            book.check_integrity()
        assert results == [[], [], [CloseWindow(KEY, TICKET)]]
        assert book.quiesced(TICKET, 2.0) == [
            Commit(KEY, HANDOVER, 0.75, "tcp"),
            Send(PREFILL.peer, Settle(key=KEY), PREFILL.endpoint),
        ]
        assert (book.open_count, book.deadline()) == (0, None)

    def test_bands_land_as_bytes_and_their_blocks_with_the_last(self, book: ImportBook) -> None:
        opened(book)
        assert book.landed(TICKET, 0, SIZE, 1.0) == book.landed(TICKET, 0, SIZE, 1.0) == []
        assert book.handover(PREFILL.peer, HANDOVER, 1.0) == []
        assert book.landed(TICKET, 3, SIZE, 2.0) == [CloseWindow(KEY, TICKET)]

    @pytest.mark.parametrize("last", [(3, SIZE - 1), (2, SIZE), (4, SIZE), (3, SIZE + 1)])
    def test_blocks_and_bytes_of_bands_must_agree(self, book: ImportBook, last: tuple[int, int]) -> None:
        opened(book)
        book.landed(TICKET, 0, 2 * SIZE, 1.0)
        assert failures(book.landed(TICKET, *last, 2.0)) == ["integrity_mismatch"]

    def test_nothing_commits_before_the_window_is_quiesced(self, book: ImportBook) -> None:
        opened(book)
        book.landed(TICKET, 3, 3 * SIZE, 1.0)
        book.handover(PREFILL.peer, HANDOVER, 1.0)
        assert book.tick(1.0) == []
        assert book.is_open(KEY)

    def test_a_full_hit_commits_on_the_handover_alone(self, book: ImportBook) -> None:
        opened(book, first_block=3, blocks=())
        handover = Handover(key=KEY, num_tokens=10, next_token=3, blocks=0, nbytes=0, ticket=TICKET)
        assert book.handover(PREFILL.peer, handover, 1.0) == [CloseWindow(KEY, TICKET)]
        assert kinds(book.quiesced(TICKET, 1.0)) == ["Commit", "Settle"]

    def test_fewer_landed_than_handed_over_waits_until_expiry(self, book: ImportBook) -> None:
        opened(book)
        book.landed(TICKET, 2, 2 * SIZE, 1.0)
        assert book.handover(PREFILL.peer, HANDOVER, 2.0) == []
        book.renew(PREFILL.peer, Renew(key=KEY, ttl=TTL), 20.0)
        instructions = book.tick(2.0 + TTL)
        assert kinds(instructions) == ["CloseWindow", "Quarantine", "Abort", "Failed"]
        assert failures(instructions) == ["import_expired"]


class TestIntegrity:
    @pytest.mark.parametrize(
        "handover",
        [
            Handover(key=KEY, num_tokens=10, next_token=3, blocks=2, nbytes=2 * SIZE, ticket=TICKET),
            Handover(key=KEY, num_tokens=10, next_token=3, blocks=3, nbytes=3 * SIZE - 1, ticket=TICKET),
            Handover(key=KEY, num_tokens=10, next_token=3, blocks=4, nbytes=4 * SIZE, ticket=TICKET),
            Handover(key=KEY, num_tokens=9, next_token=3, blocks=3, nbytes=3 * SIZE, ticket=TICKET),
        ],
    )
    def test_a_handover_of_something_else(self, book: ImportBook, handover: Handover) -> None:
        opened(book)
        book.landed(TICKET, 3, 3 * SIZE, 1.0)
        instructions = book.handover(PREFILL.peer, handover, 1.0)
        assert failures(instructions) == ["integrity_mismatch"]
        assert book.quiesced(TICKET, 1.0) == [FreeBlocks(KEY)]

    @pytest.mark.parametrize(("blocks", "nbytes"), [(4, 4 * SIZE), (3, 3 * SIZE - 1), (2, 3 * SIZE), (3, 4 * SIZE)])
    def test_a_landing_of_something_else(self, book: ImportBook, blocks: int, nbytes: int) -> None:
        opened(book)
        assert failures(book.landed(TICKET, blocks, nbytes, 1.0)) == ["integrity_mismatch"]

    def test_one_landing_too_many_while_the_window_closes(self, book: ImportBook) -> None:
        opened(book)
        book.landed(TICKET, 3, 3 * SIZE, 1.0)
        book.handover(PREFILL.peer, HANDOVER, 1.0)
        assert kinds(book.landed(TICKET, 1, SIZE, 1.0)) == ["Quarantine", "Abort", "Failed"]
        assert book.quiesced(TICKET, 1.0) == [FreeBlocks(KEY)]

    def test_stale_handovers_change_nothing(self, book: ImportBook) -> None:
        opened(book)
        book.landed(TICKET, 3, 3 * SIZE, 1.0)
        assert book.handover(STALE, HANDOVER, 1.0) == []
        other_ticket = Handover(key=KEY, num_tokens=10, next_token=3, blocks=3, nbytes=3 * SIZE, ticket=b"u" * 16)
        assert book.handover(PREFILL.peer, other_ticket, 1.0) == []
        other_attempt = Handover(
            key=RequestKey("r", 1), num_tokens=10, next_token=3, blocks=3, nbytes=3 * SIZE, ticket=TICKET
        )
        assert book.handover(PREFILL.peer, other_attempt, 1.0) == []
        assert book.handover(PREFILL.peer, HANDOVER, 1.0) == [CloseWindow(KEY, TICKET)]
        assert book.handover(PREFILL.peer, HANDOVER, 1.0) == []

    def test_unknown_tickets_change_nothing(self, book: ImportBook) -> None:
        opened(book)
        other = b"u" * 16
        assert book.landed(other, 3, 3 * SIZE, 1.0) == []
        assert book.broken(other, ChannelLost("reset"), 1.0) == []
        assert book.quiesced(other, 1.0) == []


class TestEnding:
    """Every way an import can end with its window open."""

    WAYS = (
        ("cancel", ["Abort"], []),
        ("refuse", ["Abort", "Failed"], ["lease_refused"]),
        ("broken", ["Abort", "Failed"], ["channel_lost"]),
        ("expire", ["Abort", "Failed"], ["import_expired"]),
        ("prefill_lost", ["Failed"], ["worker_lost"]),
        ("reconnected", ["Abort", "Failed"], ["channel_lost"]),
        ("fail", ["Abort", "Failed"], ["worker_draining"]),
    )

    def end(self, book: ImportBook, way: str) -> list[Instruction]:
        if way == "cancel":
            return book.cancel(KEY, 1.0)
        if way == "refuse":
            return book.refuse(PREFILL.peer, REFUSAL, 1.0)
        if way == "broken":
            return book.broken(TICKET, ChannelLost("reset"), 1.0)
        if way == "expire":
            return book.tick(1e6)
        if way == "prefill_lost":
            return book.prefill_lost(PREFILL.peer, 1.0)
        if way == "reconnected":
            return book.reconnected(PREFILL.endpoint, 1.0)
        return book.fail(KEY, WorkerDraining("leaving"), 1.0)

    @pytest.mark.parametrize(("way", "told", "codes"), WAYS)
    @pytest.mark.parametrize("landed", [0, 2, 3])
    def test_blocks_are_free_once_the_window_is_quiesced(
        self, book: ImportBook, way: str, told: list[str], codes: list[str], landed: int
    ) -> None:
        opened(book)
        if landed:
            book.landed(TICKET, landed, landed * SIZE, 0.5)
        instructions = self.end(book, way)
        assert instructions[:2] == [CloseWindow(KEY, TICKET), Quarantine(KEY)]
        assert kinds(instructions[2:]) == told
        assert failures(instructions) == codes
        assert (book.open_count, book.is_open(KEY), book.deadline()) == (1, False, None)
        book.check_integrity()
        for again, _, _ in self.WAYS:
            assert self.end(book, again) == []
        assert book.landed(TICKET, 3, 3 * SIZE, 2.0) == []
        assert book.handover(PREFILL.peer, HANDOVER, 2.0) == []
        assert book.quiesced(TICKET, 3.0) == [FreeBlocks(KEY)]
        assert book.quiesced(TICKET, 3.0) == []
        assert book.open_count == 0

    @pytest.mark.parametrize(("way", "told"), [("cancel", ["Abort"]), ("refuse", ["Abort", "Failed"])])
    def test_an_end_while_the_window_closes_for_the_commit(self, book: ImportBook, way: str, told: list[str]) -> None:
        opened(book)
        book.landed(TICKET, 3, 3 * SIZE, 1.0)
        book.handover(PREFILL.peer, HANDOVER, 1.0)
        assert kinds(self.end(book, way)) == ["Quarantine", *told]
        assert book.quiesced(TICKET, 2.0) == [FreeBlocks(KEY)]

    @pytest.mark.parametrize("way", ["broken", "prefill_lost", "reconnected"])
    def test_a_whole_import_outlives_its_prefill_worker(self, book: ImportBook, way: str) -> None:
        opened(book)
        book.landed(TICKET, 3, 3 * SIZE, 1.0)
        book.handover(PREFILL.peer, HANDOVER, 1.0)
        assert self.end(book, way) == []
        assert kinds(book.quiesced(TICKET, 2.0)) == ["Commit", "Settle"]

    @pytest.mark.parametrize("way", ["cancel", "refuse", "prefill_lost", "reconnected", "fail"])
    def test_an_end_after_the_commit_changes_nothing(self, book: ImportBook, way: str) -> None:
        opened(book)
        book.landed(TICKET, 3, 3 * SIZE, 1.0)
        book.handover(PREFILL.peer, HANDOVER, 1.0)
        book.quiesced(TICKET, 2.0)
        assert self.end(book, way) == []

    def test_a_stale_incarnation_ends_nothing(self, book: ImportBook) -> None:
        opened(book)
        assert book.refuse(STALE, REFUSAL, 1.0) == []
        assert book.prefill_lost(STALE, 1.0) == []
        assert book.reconnected("tcp://another:1", 1.0) == []
        assert book.is_open(KEY)

    def test_what_waits_tells_a_new_connection_again(self, book: ImportBook) -> None:
        book.waiting(KEY, PREFILL, TTL, 0.0)
        assert (book.reconnected(PREFILL.endpoint, 1.0), kinds(book.tick(TTL))) == ([], ["Renew"])

    def test_the_error_reaches_the_router_and_prefill(self, book: ImportBook) -> None:
        opened(book)
        instructions = book.broken(TICKET, ChannelLost("reset by peer"), 1.0)
        error = ErrorInfo(code="channel_lost", message="reset by peer")
        assert instructions[2:] == [
            Send(PREFILL.peer, Abort(key=KEY, error=error), PREFILL.endpoint),
            Failed(KEY, error, b"router-0"),
        ]


class TestWaiting:
    def test_the_lease_is_renewed_while_the_request_waits(self, book: ImportBook) -> None:
        assert book.waiting(KEY, PREFILL, TTL, 0.0) == [RENEWAL]
        assert book.deadline() == 10.0
        assert book.tick(9.9) == []
        for now in (10.0, 20.0, 30.0, 300.0):
            assert book.tick(now) == [RENEWAL]
            book.check_integrity()
        assert book.deadline() == 310.0
        assert kinds(opened(book, 300.0)) == ["OpenWindow", "Grant"]

    def test_renewals_go_on_while_importing(self, book: ImportBook) -> None:
        opened(book)
        assert [book.tick(now) for now in (10.0, 20.0)] == [[RENEWAL], [RENEWAL]]
        assert failures(book.tick(30.0)) == ["import_expired"]

    def test_a_prefill_worker_that_answers_keeps_the_import(self, book: ImportBook) -> None:
        opened(book)
        for now in range(10, 200, 10):
            assert book.tick(float(now)) == [RENEWAL]
            assert book.renew(PREFILL.peer, Renew(key=KEY, ttl=TTL), float(now)) == []
        assert book.renew(STALE, Renew(key=KEY, ttl=TTL), 215.0) == []
        assert book.tick(219.9) != []
        assert failures(book.tick(220.0)) == ["import_expired"]

    def test_a_landing_keeps_the_import(self, book: ImportBook) -> None:
        opened(book)
        book.landed(TICKET, 1, SIZE, 25.0)
        book.tick(50.0)
        assert book.is_open(KEY)
        assert failures(book.tick(55.0)) == ["import_expired"]

    @pytest.mark.parametrize(
        ("way", "told"),
        [
            ("cancel", ["Abort"]),
            ("refuse", ["Abort", "Failed"]),
            ("prefill_lost", ["Failed"]),
            ("fail", ["Abort", "Failed"]),
        ],
    )
    def test_an_end_while_waiting(self, book: ImportBook, way: str, told: list[str]) -> None:
        book.waiting(KEY, PREFILL, TTL, 0.0)
        assert kinds(TestEnding().end(book, way)) == told
        assert (book.open_count, book.deadline()) == (0, None)
        assert opened(book, 2.0) == [FreeBlocks(KEY)], "the reservation came too late"
        assert book.waiting(KEY, PREFILL, TTL, 2.0) == []
        assert book.open_count == 0

    def test_a_cancel_before_the_request(self, book: ImportBook) -> None:
        assert book.cancel(KEY, 0.0) == []
        assert book.waiting(KEY, PREFILL, TTL, 1.0) == []
        assert opened(book, 1.0) == [FreeBlocks(KEY)]
        assert not book.is_open(KEY)

    def test_another_attempt_is_another_import(self, book: ImportBook) -> None:
        book.cancel(KEY, 0.0)
        second = RequestKey("r", 1)
        assert kinds(opened(book, 1.0, key=second)) == ["OpenWindow", "Grant"]
        assert book.refuse(PREFILL.peer, REFUSAL, 1.0) == []
        assert book.cancel(KEY, 1.0) == []
        assert book.is_open(second)


class TestMisuse:
    @pytest.mark.parametrize("ttl", [0.0, -1.0, math.nan, math.inf])
    def test_bad_ttl_is_named(self, book: ImportBook, ttl: float) -> None:
        with pytest.raises(InvalidRequest, match="ttl"):
            book.waiting(KEY, PREFILL, ttl, 0.0)
        with pytest.raises(InvalidRequest, match="ttl"):
            opened(book, ttl=ttl)
        assert book.open_count == 0

    def test_opened_twice(self, book: ImportBook) -> None:
        opened(book)
        with pytest.raises(IllegalTransition, match="OPEN is illegal in WAITING -OPEN-> IMPORTING"):
            opened(book, ticket=b"u" * 16)

    def test_opened_again_while_draining(self, book: ImportBook) -> None:
        opened(book)
        book.cancel(KEY, 1.0)
        with pytest.raises(IllegalTransition, match="OPEN"):
            opened(book, 2.0, ticket=b"u" * 16)

    def test_a_ticket_twice(self, book: ImportBook) -> None:
        opened(book)
        with pytest.raises(InvariantViolation, match="ticket"):
            opened(book, key=RequestKey("s", 0))

    def test_blocks_that_do_not_fit_the_prompt(self, book: ImportBook) -> None:
        with pytest.raises(InvariantViolation, match="10 tokens"):
            opened(book, blocks=(21, 22))

    def test_quiesced_unasked(self, book: ImportBook) -> None:
        opened(book)
        with pytest.raises(IllegalTransition, match="QUIESCED"):
            book.quiesced(TICKET, 1.0)
