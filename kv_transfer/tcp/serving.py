"""The receiver's side of a connection: hello, then frame after frame into the windows that are open.

Until a frame's ticket is known to be that of an open window, nothing is allocated for it; what a refused frame still
sends is read into nowhere, so that the connection stays in step.
"""

from __future__ import annotations

import time
from collections.abc import Generator

from kv_transfer.checksum import SUM_BYTES, Checksum
from kv_transfer.tcp import wire
from kv_transfer.tcp.handshake import admit
from kv_transfer.tcp.steps import Conversation, Cursor, Fill, Inbox, Read, Skip, Step, Write
from kv_transfer.tcp.wire import FrameHead, Verdict
from kv_transfer.transport import TransportConfig
from kv_transfer.windows import OpenWindow, WindowBook
from protocol.errors import ChannelLost, IntegrityMismatch, TicketRejected

INBOX_BYTES = 1 << 10
"""Room for a head and the tables of some thirty blocks. What it takes in of the payload is copied once more."""


def serve(book: WindowBook, memory: memoryview, config: TransportConfig) -> Conversation:
    """Serve one connection until it ends.

    Args:
        book: the receiver's windows.
        memory: what is written.
        config: timeout is what a new connection has for its hello, secret what it must know.

    Raises:
        ChannelLost: it ended.
        ProtocolError: the peer sent something else than the protocol.
    """
    inbox = Inbox(INBOX_BYTES)
    peer = yield from admit(inbox, config)
    try:
        while True:
            yield from _frame(inbox, peer, book, memory, config)
    finally:
        book.lost(inbox)


def _write(data: bytes, timeout: float) -> Write:
    return Write(Cursor([memoryview(data)]), timeout=timeout)


def _frame(
    inbox: Inbox, peer: str, book: WindowBook, memory: memoryview, config: TransportConfig
) -> Generator[Step, bool, None]:
    if inbox.held < wire.FRAME.size:
        yield Fill(inbox, wire.FRAME.size)
    raw = inbox.take(wire.FRAME.size)
    head = wire.parse_head(raw)
    checksum = Checksum(raw) if head.summed else None
    unread = head.table_bytes + head.payload + head.tail_bytes
    try:
        window = book.claim(head.ticket, peer, head.spans, head.blocks)
        if config.checksum and not head.summed:
            raise TicketRejected("the receiver takes nothing without a checksum")
        table = bytearray(head.table_bytes)
        yield from _table(inbox, table)
        unread -= head.table_bytes
        part = wire.parse_tables(head, table)
        if checksum is not None:
            checksum.update(table)
        window.admit(part, time.monotonic(), inbox)
        views = [memory[offset : offset + nbytes] for offset, nbytes in part.targets]
        cursor = Cursor(views, checksum)
        try:
            yield from _payload(inbox, window, cursor)
            unread = cursor.left + head.tail_bytes
            if checksum is not None and not cursor.left:
                unread = 0
                yield from _check(inbox, head, checksum.digest())
        except (ChannelLost, IntegrityMismatch) as error:
            window.abandon(part, error)
            raise
        landed = window.complete(part, time.monotonic())
    except (TicketRejected, IntegrityMismatch) as refusal:
        verdict = Verdict.REFUSED if isinstance(refusal, TicketRejected) else Verdict.DAMAGED
        yield _write(wire.pack_answer(head, verdict, refusal.message), config.timeout)
        yield Skip(unread - inbox.take(unread).nbytes)
        return
    try:
        # The sender waits for this; the report wakes our own event loop and would get in its way.
        yield _write(wire.pack_answer(head, Verdict.LANDED), config.timeout)
    finally:
        if landed is not None:
            window.report(landed)


def _table(inbox: Inbox, table: bytearray) -> Generator[Step, bool, None]:
    cursor = Cursor([memoryview(table)])
    cursor.put(inbox.take(cursor.left))
    if cursor.left:
        yield Read(cursor)


def _payload(inbox: Inbox, window: OpenWindow, cursor: Cursor) -> Generator[Step, bool, None]:
    if inbox.held and window.gate.enter():
        cursor.put(inbox.take(cursor.left))
        window.gate.leave()
    if cursor.left:
        yield Read(cursor, gate=window.gate)


def _check(inbox: Inbox, head: FrameHead, reckoned: bytes) -> Generator[Step, bool, None]:
    if inbox.held < SUM_BYTES:
        yield Fill(inbox, SUM_BYTES)
    if inbox.take(SUM_BYTES) != reckoned:
        raise IntegrityMismatch(f"part {head.part} of ship {head.ship:x} has not the checksum that it was sent with")
