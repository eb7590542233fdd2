"""The receiver's side of one connection: hello, the sender's memory, then frame after frame into open windows.

One thread per connection, which blocks on the socket and copies. It ends when the peer goes, when the peer says
something else than the protocol, or when :meth:`Service.end` shuts the socket.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack, suppress

from kv_transfer import hello
from kv_transfer.checksum import Checksum
from kv_transfer.shm import wire
from kv_transfer.shm.copying import SUMMED_BYTES, Copier, Run, batches
from kv_transfer.shm.ledger import ReceiverLedger
from kv_transfer.shm.target import Target
from kv_transfer.shm.wire import Verdict
from kv_transfer.transport import TransportConfig
from kv_transfer.windows import OpenWindow, Part, WindowBook
from protocol.errors import ChannelLost, IntegrityMismatch, KVFerryError, MalformedFrame, TicketRejected

MAX_DESCRIPTORS = 8
SKIP_BYTES = 64 << 10


class Service:
    """See the module.

    Args:
        connection: blocking; closed at the end.
        book: the receiver's windows.
        target: what is written.
        config: timeout is what the peer has for its hello and its offer, secret what it must know.
    """

    def __init__(self, connection: socket.socket, book: WindowBook, target: Target, config: TransportConfig) -> None:
        self._connection = connection
        self._book = book
        self._target = target
        self._config = config
        self._deadline = time.monotonic() + config.timeout

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
                peer = self._greet()
                # Not one descriptor of a stranger's is taken, and nothing of it mapped.
                copier, ledger = self._welcome(stack)
                while True:
                    self._frame(peer, copier, ledger)
            except OSError as error:
                raise ChannelLost(f"connection lost: {error}") from error

    def _greet(self) -> str:
        party = hello.Party(self._target.scheme, self._target.versions, self._config)
        talk = hello.admit(party)
        heard: bytes | None = None
        while True:
            try:
                asked = next(talk) if heard is None else talk.send(heard)
            except StopIteration as end:
                met: hello.Met = end.value
                return met.name
            self._connection.settimeout(self._left())
            if isinstance(asked, int):
                heard = bytes(self._read(asked, hurried=True))
            else:
                self._connection.sendall(asked)
                heard = b""

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise ChannelLost("the hello took too long")
        return left

    def _welcome(self, stack: ExitStack) -> tuple[Copier, ReceiverLedger]:
        descriptors: list[int] = []
        try:
            offer = self._offer(descriptors)
            try:
                copier = self._target.attach(offer, descriptors[:-1], self._connection)
                stack.callback(copier.release)
                ledger = ReceiverLedger(descriptors[-1])
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
        return copier, ledger

    def _offer(self, descriptors: list[int]) -> bytes:
        """What the sender offers; what comes with it is added to ``descriptors``, whatever happens."""
        offer = bytearray()
        wanted = self._target.offer_descriptors + 1
        while len(offer) < self._target.offer_bytes:
            self._connection.settimeout(self._left())
            room = self._target.offer_bytes - len(offer)
            data, found, flags, _ = socket.recv_fds(self._connection, room, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
            descriptors += found
            if not data:
                raise ChannelLost("the peer closed the connection")
            if flags & socket.MSG_CTRUNC or len(descriptors) > wanted:
                raise MalformedFrame(f"an offer with more than {wanted} descriptors")
            offer += data
        if len(descriptors) != wanted:
            error = MalformedFrame(f"an offer with {len(descriptors)} descriptors, not {wanted}")
            self._connection.sendall(wire.pack_welcome(error.message))
            raise error
        return bytes(offer)

    def _read(self, nbytes: int, *, hurried: bool = False) -> bytearray:
        data = bytearray(nbytes)
        with memoryview(data) as view:
            done = 0
            while done < nbytes:
                if hurried:
                    self._connection.settimeout(self._left())
                count = self._connection.recv_into(view[done:])
                if not count:
                    raise ChannelLost("the peer closed the connection")
                done += count
        return data

    def _skip(self, nbytes: int) -> None:
        while nbytes:
            nbytes -= len(self._read(min(nbytes, SKIP_BYTES)))

    def _frame(self, peer: str, copier: Copier, ledger: ReceiverLedger) -> None:
        raw = self._read(wire.FRAME.size)
        head = wire.parse_head(raw)
        try:
            window = self._book.claim(head.ticket, peer, head.spans, head.blocks)
            if self._config.checksum and not head.summed:
                raise TicketRejected("the receiver takes nothing without a checksum")
        except TicketRejected as refusal:
            self._connection.sendall(wire.pack_answer(head.ship, Verdict.REFUSED, refusal.message))
            self._skip(head.table_bytes + head.tail_bytes)
            return
        table = self._read(head.table_bytes)
        wanted = bytes(self._read(head.tail_bytes))
        try:
            runs, generations = wire.parse_tables(head, table, copier.nbytes)
            if not ledger.valid(head.slot, head.ship):
                raise TicketRejected("the ship was withdrawn")
            part = Part(head.ship, 0, 1, [(target, nbytes) for _, target, nbytes in runs], generations)
            window.admit(part, time.monotonic())
            checksum = Checksum(raw + table) if head.summed else None
            whole = _fill(window, part, runs, copier, ledger, head, checksum)
            if whole and checksum is not None and checksum.digest() != wanted:
                error = IntegrityMismatch(f"ship {head.ship:x} has not the checksum that it was sent with")
                window.abandon(part, error)
                raise error
            landed = window.complete(part, time.monotonic())
        except (TicketRejected, ChannelLost, IntegrityMismatch) as refusal:
            verdict = Verdict.DAMAGED if isinstance(refusal, IntegrityMismatch) else Verdict.REFUSED
            self._connection.sendall(wire.pack_answer(head.ship, verdict, refusal.message))
            return
        try:
            # The sender waits for this; the report wakes our own event loop and would get in its way.
            self._connection.sendall(wire.pack_answer(head.ship, Verdict.LANDED))
        finally:
            assert landed is not None, "the only part"
            window.report(landed)


def _fill(
    window: OpenWindow,
    part: Part,
    runs: list[Run],
    copier: Copier,
    ledger: ReceiverLedger,
    head: wire.FrameHead,
    checksum: Checksum | None,
) -> bool:
    """Copy every run, and sum what was copied, as long as the window is open; whether it was to the end.

    A ship that its sender withdraws never lands, nor one of which a batch could not be copied.
    """
    copied = 0
    error = ChannelLost("the sender withdrew the ship")
    longest = copier.batch_bytes if checksum is None else min(copier.batch_bytes, SUMMED_BYTES)
    for batch in batches(runs, longest):
        if not window.gate.enter():
            return False
        try:
            wanted = ledger.enter(head.slot, head.ship)
            if wanted:
                try:
                    copier.copy(batch, summed=checksum is not None)
                    copied += sum(nbytes for _, _, nbytes in batch)
                except ChannelLost as failure:
                    wanted, error = False, failure
                wanted = ledger.leave(head.slot, head.ship, copied) and wanted
            if wanted and checksum is not None:
                # Our own copy of the bytes: the sender may have its memory back meanwhile.
                copier.sum(batch, checksum)
        finally:
            window.gate.leave()
        if not wanted:
            window.abandon(part, error)
            raise error
    return True
