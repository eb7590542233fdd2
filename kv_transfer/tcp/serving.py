"""The receiver's side of a connection: hello, then frame after frame into the windows that are open.

Until a frame's ticket is known to be that of an open window, nothing is allocated for it; what a refused frame still
sends is read into nowhere, so that the connection stays in step.
"""

from __future__ import annotations

import time
from collections.abc import Generator

from kv_transfer.tcp import wire
from kv_transfer.tcp.steps import Conversation, Cursor, Read, Skip, Step, Write
from kv_transfer.windows import OpenWindow, Part, WindowBook
from protocol.errors import ChannelLost, TicketRejected, VersionMismatch


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
    hello = bytearray(wire.HELLO.size)
    yield _read(hello, timeout)
    answer = _write(wire.pack_hello(), timeout)
    try:
        wire.check_hello(hello)
    except VersionMismatch:
        # The peer shall learn which versions there are before it is turned away.
        yield answer
        raise
    yield answer
    while True:
        yield from _frame(book, memory, timeout)


def _read(buffer: bytearray, timeout: float | None = None) -> Read:
    return Read(Cursor([memoryview(buffer)]), timeout=timeout)


def _write(data: bytes, timeout: float) -> Write:
    return Write(Cursor([memoryview(data)]), timeout=timeout)


def _frame(book: WindowBook, memory: memoryview, timeout: float) -> Generator[Step, bool, None]:
    raw = bytearray(wire.FRAME.size)
    yield _read(raw)
    head = wire.parse_head(raw)
    unread = head.table_bytes + head.payload
    try:
        window = book.find(head.ticket)
        table = bytearray(head.table_bytes)
        yield _read(table)
        unread = head.payload
        part = wire.parse_tables(head, table)
        window.admit(part, time.monotonic())
        cursor = Cursor([memory[offset : offset + nbytes] for offset, nbytes in part.targets])
        yield from _payload(window, part, cursor)
        unread = cursor.left
        landed = window.complete(part, time.monotonic())
    except TicketRejected as refusal:
        yield _write(wire.pack_answer(head, refusal.message), timeout)
        yield Skip(unread)
        return
    try:
        # The sender waits for this; the report wakes our own event loop and would get in its way.
        yield _write(wire.pack_answer(head, None), timeout)
    finally:
        if landed is not None:
            window.report(landed)


def _payload(window: OpenWindow, part: Part, cursor: Cursor) -> Generator[Step, bool, None]:
    try:
        yield Read(cursor, gate=window.gate)
    except ChannelLost as error:
        window.abandon(part, error)
        raise
