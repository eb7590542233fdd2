"""What a handoff carries for several continuations of one prompt."""

from __future__ import annotations

import pytest
from lease_cases import KEY, LAYOUT, READER, TICKET, TTL, grant, opened, shipping

from kv_transfer.imports import ImportBook
from kv_transfer.instructions import CloseWindow, Failed, Send
from kv_transfer.lease import LeaseBook
from protocol.ids import Peer
from protocol.messages import Handover, PrefillAddress

PREFILL = PrefillAddress(peer=Peer("prefill-0", 4), endpoint="tcp://p:1")


def test_the_hand_over_brings_each_continuation_its_first_token() -> None:
    book = LeaseBook()
    shipping(book)
    sent = book.finished(KEY, 3, 0.0, fork_tokens=(4, 3, 9))
    (handover,) = [each.message for each in sent if isinstance(each, Send) and each.peer == READER]
    assert isinstance(handover, Handover)
    assert (handover.next_token, handover.fork_tokens) == (3, (4, 3, 9))


@pytest.mark.parametrize("tokens", [(), (4,), (4, 3, 9)])
def test_a_hand_over_for_another_number_of_continuations_fails(tokens: tuple[int, ...]) -> None:
    book = ImportBook()
    blocks = (21, 22, 23)
    book.open(KEY, PREFILL, 0, blocks, blocks, 10, LAYOUT, ("inproc://d",), TICKET, TTL, 0.0, forks=2)
    size = 3 * LAYOUT.block_bytes
    book.landed(TICKET, 3, size, 0.0)
    message = Handover(key=KEY, num_tokens=10, next_token=3, blocks=3, nbytes=size, ticket=TICKET, fork_tokens=tokens)
    (error,) = [each.error for each in book.handover(PREFILL.peer, message, 0.0) if isinstance(each, Failed)]
    assert error.code == "integrity_mismatch"
    assert f"2 forks asked for, {len(tokens)} handed over" in error.message


@pytest.mark.parametrize(("first", "forks"), [(32, (4, 5)), (3, (32, 5)), (3, (4, 99)), ((1 << 31) - 1, (4, 5))])
def test_a_token_outside_the_vocabulary_ends_this_import_alone(first: int, forks: tuple[int, int]) -> None:
    book = ImportBook()
    blocks = (21, 22, 23)
    book.open(KEY, PREFILL, 0, blocks, blocks, 10, LAYOUT, ("inproc://d",), TICKET, TTL, 0.0, forks=2, vocab_size=32)
    size = 3 * LAYOUT.block_bytes
    message = Handover(
        key=KEY, num_tokens=10, next_token=first, blocks=3, nbytes=size, ticket=TICKET, fork_tokens=forks
    )
    (error,) = [each.error for each in book.handover(PREFILL.peer, message, 0.0) if isinstance(each, Failed)]
    assert error.code == "integrity_mismatch"
    assert f"token id {max(first, *forks)} was handed over, outside the vocabulary of 32" in error.message
    assert not book.is_open(KEY)


def test_a_hand_over_for_all_of_them_commits() -> None:
    book = ImportBook()
    blocks = (21, 22, 23)
    book.open(KEY, PREFILL, 0, blocks, blocks, 10, LAYOUT, ("inproc://d",), TICKET, TTL, 0.0, forks=2)
    size = 3 * LAYOUT.block_bytes
    book.landed(TICKET, 3, size, 0.0)
    message = Handover(key=KEY, num_tokens=10, next_token=3, blocks=3, nbytes=size, ticket=TICKET, fork_tokens=(4, 5))
    assert book.handover(PREFILL.peer, message, 0.0) == [CloseWindow(KEY, TICKET)]


def test_a_lease_tells_where_its_prompt_ends_as_long_as_it_holds_the_block() -> None:
    book = opened(LeaseBook())
    book.grant(READER, grant(), 0.0)
    book.computed(KEY, [5, 6], 0.0)
    assert book.ends() == {}, "the last block is not computed"
    book.computed(KEY, [9], 0.0)
    assert book.ends() == {9: 2}
    book.cancel(KEY, 0.0)
    assert book.ends() == {9: 2}, "ships are in flight, and hold it"
