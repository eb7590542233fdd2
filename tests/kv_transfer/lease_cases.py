"""One lease in every situation, for the tests of the lease book."""

from __future__ import annotations

from kv_transfer.instructions import Instruction, Send, Ship
from kv_transfer.lease import LeaseBook
from protocol.errors import (
    ImportExpired,
)
from protocol.ids import Peer, RequestKey
from protocol.layout import KVLayout
from protocol.messages import Abort, ErrorInfo, Grant, Refuse

KEY = RequestKey("r", 0)
READER = Peer("decode-0", 7)
STALE = Peer("decode-0", 6)
ROUTER = b"router-0"
LAYOUT = KVLayout(num_layers=2, kv_heads=2, head_dim=4, block_size=4, dtype="float32")
TICKET = b"t" * 16
TTL = 30.0
ABORT = Abort(key=KEY, error=ErrorInfo.of(ImportExpired("late")))


def of_block_size(size: int) -> KVLayout:
    return KVLayout(num_layers=2, kv_heads=2, head_dim=4, block_size=size, dtype="float32")


def grant(
    first_block: int = 0, blocks: tuple[int, ...] = (21, 22, 23), layout: KVLayout = LAYOUT, **changes: object
) -> Grant:
    fields: dict[str, object] = {
        "key": KEY,
        "first_block": first_block,
        "blocks": blocks,
        "generations": tuple(100 + block for block in blocks),
        "layout": layout,
        "addresses": ("inproc://d",),
        "ticket": TICKET,
        "ttl": TTL,
    }
    return Grant(**{**fields, **changes})  # type: ignore[arg-type]


def opened(book: LeaseBook, now: float = 0.0) -> LeaseBook:
    assert book.open(KEY, READER, ROUTER, 10, 4, TTL, now) == []
    return book


def shipping(book: LeaseBook, now: float = 0.0) -> list[Ship]:
    """Open, granted, two chunks in flight."""
    opened(book, now)
    assert book.grant(READER, grant(), now) == []
    first = book.computed(KEY, [5, 6], now)
    second = book.computed(KEY, [9], now)
    return [each for each in (*first, *second) if isinstance(each, Ship)]


def handed_over(book: LeaseBook, now: float = 0.0) -> list[Instruction]:
    ships = shipping(book, now)
    told = book.finished(KEY, 3, now)
    return [*told, *(each for ship in ships for each in report(book, ship, now))]


def report(book: LeaseBook, ship: Ship, now: float) -> list[Instruction]:
    count = len(ship.source_blocks)
    return book.shipped(ship.key, ship.ship_id, count * LAYOUT.block_bytes, count, now)


def refusals(instructions: list[Instruction], peer: Peer = READER) -> list[str]:
    """Codes of the refusals, which must all go to ``peer``."""
    found = [each for each in instructions if isinstance(each, Send) and isinstance(each.message, Refuse)]
    assert all(each.peer == peer for each in found)
    return [each.message.error.code for each in found if isinstance(each.message, Refuse)]


def kinds(instructions: list[Instruction]) -> list[str]:
    return [type(each.message if isinstance(each, Send) else each).__name__ for each in instructions]
