"""The receiver's side of one connection: hello, then frame after frame into the windows that are open.

One thread per connection, which blocks on the socket and copies. It ends when the peer goes, when the peer says
something else than the protocol, or when :meth:`Service.end` shuts the socket.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack, suppress

from kv_transfer.shm import sealed, wire
from kv_transfer.shm.copying import Copier, Run, batches
from kv_transfer.shm.ledger import ReceiverLedger
from kv_transfer.windows import OpenWindow, Part, WindowBook
from protocol.errors import ChannelLost, KVFerryError, MalformedFrame, TicketRejected

DESCRIPTORS = 2
MAX_DESCRIPTORS = 8
SKIP_BYTES = 64 << 10


class Service:
    """See the module.

    Args:
        connection: blocking; closed at the end.
        book: the receiver's windows.
        memory: what is written.
        timeout: seconds that the peer has for its hello.
    """

    def __init__(self, connection: socket.socket, book: WindowBook, memory: memoryview, timeout: float) -> None:
        self._connection = connection
        self._book = book
        self._memory = memory
        self._timeout = timeout

    def end(self) -> None:
        """Have :meth:`run` return soon; from any thread."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        """Serve until the end.

        Raises:
            KVFerryError: what ended it.
        """
        with ExitStack() as stack:
            stack.callback(self._connection.close)
            try:
                pool, ledger = self._welcome(stack)
                copier = Copier(pool, self._memory)
                stack.callback(copier.release)
                while True:
                    self._frame(copier, ledger, pool.nbytes)
            except OSError as error:
                raise ChannelLost(f"connection lost: {error}") from error

    def _welcome(self, stack: ExitStack) -> tuple[memoryview, ReceiverLedger]:
        self._connection.settimeout(self._timeout)
        deadline = time.monotonic() + self._timeout
        hello = bytearray()
        descriptors: list[int] = []
        try:
            while len(hello) < wire.HELLO.size:
                if time.monotonic() > deadline:
                    raise ChannelLost("no hello came")
                room = wire.HELLO.size - len(hello)
                data, found, flags, _ = socket.recv_fds(
                    self._connection, room, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
                descriptors += found
                if not data:
                    raise ChannelLost("the peer closed the connection")
                if flags & socket.MSG_CTRUNC or len(descriptors) > DESCRIPTORS:
                    raise MalformedFrame("a hello with more than two descriptors")
                hello += data
            try:
                nbytes = wire.parse_hello(hello)
                if len(descriptors) != DESCRIPTORS:
                    raise MalformedFrame(f"a hello with {len(descriptors)} descriptors, not {DESCRIPTORS}")
                mapped = sealed.attach(descriptors[0], nbytes, writable=False)
                stack.callback(mapped.close)
                ledger = ReceiverLedger(descriptors[1])
                descriptors.pop()
                stack.callback(ledger.close)
            except KVFerryError as error:
                # The peer shall learn why before it is turned away.
                self._connection.sendall(wire.pack_welcome(error.message))
                raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._connection.sendall(wire.pack_welcome(None))
        self._connection.settimeout(None)
        pool = memoryview(mapped)
        stack.callback(pool.release)
        return pool, ledger

    def _read(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        with memoryview(data) as view:
            done = 0
            while done < nbytes:
                count = self._connection.recv_into(view[done:])
                if not count:
                    raise ChannelLost("the peer closed the connection")
                done += count
        return data

    def _skip(self, nbytes: int) -> None:
        while nbytes:
            nbytes -= len(self._read(min(nbytes, SKIP_BYTES)))

    def _frame(self, copier: Copier, ledger: ReceiverLedger, pool_bytes: int) -> None:
        head = wire.parse_head(self._read(wire.FRAME.size))
        unread = head.table_bytes
        try:
            window = self._book.find(head.ticket)
            table = self._read(unread)
            unread = 0
            runs, generations = wire.parse_tables(head, table, pool_bytes)
            if not ledger.valid(head.slot, head.ship):
                raise TicketRejected("the ship was withdrawn")
            part = Part(head.ship, 0, 1, [(target, nbytes) for _, target, nbytes in runs], generations)
            window.admit(part, time.monotonic())
            _fill(window, part, runs, copier, ledger, head)
            landed = window.complete(part, time.monotonic())
        except (TicketRejected, ChannelLost) as refusal:
            self._skip(unread)
            self._connection.sendall(wire.pack_answer(head.ship, refusal.message))
            return
        try:
            # The sender waits for this; the report wakes our own event loop and would get in its way.
            self._connection.sendall(wire.pack_answer(head.ship, None))
        finally:
            assert landed is not None, "the only part"
            window.report(landed)


def _fill(
    window: OpenWindow, part: Part, runs: list[Run], copier: Copier, ledger: ReceiverLedger, head: wire.FrameHead
) -> None:
    """Copy every run, as long as the window is open; a ship that its sender withdraws never lands."""
    copied = 0
    for batch in batches(runs):
        if not window.gate.enter():
            return
        try:
            wanted = ledger.enter(head.slot, head.ship)
            if wanted:
                copier.copy(batch)
                copied += sum(nbytes for _, _, nbytes in batch)
                wanted = ledger.leave(head.slot, head.ship, copied)
        finally:
            window.gate.leave()
        if not wanted:
            error = ChannelLost("the sender withdrew the ship")
            window.abandon(part, error)
            raise error
