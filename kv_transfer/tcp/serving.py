"""The receiver's side of a connection: hello, then frame after frame into the windows that are open.

Until a frame's ticket is known to be that of an open window, nothing is allocated for it; what a refused frame still
sends is read into nowhere, so that the connection stays in step.
"""

from __future__ import annotations

import time
from collections.abc import Generator

from kv_transfer.tcp import wire
from kv_transfer.tcp.steps import Conversation, Cursor, Fill, Inbox, Read, Skip, Step, Write
from kv_transfer.windows import OpenWindow, Part, WindowBook
from protocol.errors import ChannelLost, TicketRejected, VersionMismatch

INBOX_BYTES = 1 << 10
"""Room for a head and the tables of some thirty blocks. What it takes in of the payload is copied once more."""


def serve(book: WindowBook, memory: memoryview, timeout: float) -> Conversation:
    """Serve one connection until it ends.

    Args:
        book: the receiver's windows.
        memory: what is written.
        timeout: seconds a new connection has for its hello.

    Raises:
        ChannelLost: it ended.
        ProtocolError: the peer sent something else than the protocol.
    """
    inbox = Inbox(INBOX_BYTES)
    yield Fill(inbox, wire.HELLO.size, timeout=timeout)
    hello = bytes(inbox.take(wire.HELLO.size))
    answer = _write(wire.pack_hello(), timeout)
    try:
        wire.check_hello(hello)
    except VersionMismatch:
        # The peer shall learn which versions there are before it is turned away.
        yield answer
        raise
    yield answer
    while True:
        yield from _frame(inbox, book, memory, timeout)


def _write(data: bytes, timeout: float) -> Write:
    return Write(Cursor([memoryview(data)]), timeout=timeout)


def _frame(inbox: Inbox, book: WindowBook, memory: memoryview, timeout: float) -> Generator[Step, bool, None]:
    if inbox.held < wire.FRAME.size:
        yield Fill(inbox, wire.FRAME.size)
    head = wire.parse_head(inbox.take(wire.FRAME.size))
    unread = head.table_bytes + head.payload
    try:
        window = book.find(head.ticket)
        table = bytearray(head.table_bytes)
        yield from _table(inbox, table)
        unread = head.payload
        part = wire.parse_tables(head, table)
        window.admit(part, time.monotonic())
        cursor = Cursor([memory[offset : offset + nbytes] for offset, nbytes in part.targets])
        yield from _payload(inbox, window, part, cursor)
        unread = cursor.left
        landed = window.complete(part, time.monotonic())
    except TicketRejected as refusal:
        yield _write(wire.pack_answer(head, refusal.message), timeout)
        yield Skip(unread - inbox.take(unread).nbytes)
        return
    try:
        # The sender waits for this; the report wakes our own event loop and would get in its way.
        yield _write(wire.pack_answer(head, None), timeout)
    finally:
        if landed is not None:
            window.report(landed)


def _table(inbox: Inbox, table: bytearray) -> Generator[Step, bool, None]:
    cursor = Cursor([memoryview(table)])
    cursor.put(inbox.take(cursor.left))
    if cursor.left:
        yield Read(cursor)


def _payload(inbox: Inbox, window: OpenWindow, part: Part, cursor: Cursor) -> Generator[Step, bool, None]:
    if inbox.held and window.gate.enter():
        cursor.put(inbox.take(cursor.left))
        window.gate.leave()
    if not cursor.left:
        return
    try:
        yield Read(cursor, gate=window.gate)
    except ChannelLost as error:
        window.abandon(part, error)
        raise
