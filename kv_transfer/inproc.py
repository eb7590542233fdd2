"""The reference transport: sender and receiver in one process, copying block by block on the event loop.

It exists to say what the others must do, and to test against. Between any two blocks the loop runs, so a window may
be closed, or a ship aborted, in mid-transfer.

Life cycle of a receiver: made (its name is taken) -> closed (the name is free again).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

from kv_transfer.band import Band
from kv_transfer.memory import as_bytes
from kv_transfer.ships import Ship, ShipBook, check_ship
from kv_transfer.span import Span
from kv_transfer.transport import OnBroken, OnLanded, Receiver, Sender, ShipReport, TransportConfig, Window
from kv_transfer.windows import OpenWindow, Part, WindowBook
from protocol.errors import ChannelLost, ConfigError, TicketRejected, TransferError

SCHEME = "inproc://"
ANY_NAME = SCHEME + "*"


class Exchange:
    """The receivers of one process, by address."""

    def __init__(self) -> None:
        self._receivers: dict[str, InprocReceiver] = {}
        self._numbers = itertools.count()

    def join(self, address: str, receiver: InprocReceiver) -> str:
        """Take ``address``, or a fresh one for ``inproc://*``; returns it."""
        name = f"{SCHEME}receiver-{next(self._numbers)}" if address == ANY_NAME else address
        if not name.startswith(SCHEME) or len(name) == len(SCHEME) or name in self._receivers:
            raise ConfigError(f"address must be a free inproc://name, got {address!r}", field="address")
        self._receivers[name] = receiver
        return name

    def leave(self, address: str) -> None:
        """Give ``address`` up."""
        self._receivers.pop(address, None)

    def find(self, address: str) -> InprocReceiver:
        """Who has ``address``.

        Raises:
            ChannelLost: nobody.
        """
        found = self._receivers.get(address)
        if found is None:
            raise ChannelLost(f"nobody listens at {address}")
        return found


PROCESS = Exchange()
"""An inproc address means the same in the whole process, as a TCP port does on a host; hence one exchange for it."""


class InprocReceiver(Receiver):
    """See :class:`~kv_transfer.transport.Receiver`."""

    def __init__(self, bind: str, memory: memoryview, exchange: Exchange = PROCESS) -> None:
        self.memory = as_bytes(memory, writable=True)
        self.book = WindowBook(self.memory.nbytes, "inproc")
        self._exchange = exchange
        self._closed = False
        self._address = exchange.join(bind, self)

    @property
    def address(self) -> str:
        """``inproc://name``."""
        return self._address

    def open(self, window: Window, on_landed: OnLanded, on_broken: OnBroken) -> None:
        """See :meth:`Receiver.open`."""
        if self._closed:
            raise ChannelLost("the receiver is closed")
        self.book.open(window, on_landed, on_broken)

    async def close_window(self, ticket: bytes) -> None:
        """See :meth:`Receiver.close_window`."""
        await self.book.close(ticket)

    async def close(self) -> None:
        """See :meth:`Receiver.close`."""
        if self._closed:
            return
        self._closed = True
        self._exchange.leave(self._address)
        for ticket in self.book.tickets():
            await self.book.close(ticket)
        self.memory = memoryview(b"")


class InprocSender(Sender):
    """See :class:`~kv_transfer.transport.Sender`."""

    def __init__(self, memory: memoryview, name: str = "", exchange: Exchange = PROCESS) -> None:
        self._name = name
        self._memory = as_bytes(memory, writable=False)
        self._book = ShipBook()
        self._exchange = exchange

    async def ship(
        self,
        address: str,
        ticket: bytes,
        spans: Sequence[Span],
        generations: Sequence[tuple[int, int]],
        *,
        band: Band | None = None,
    ) -> ShipReport:
        """See :meth:`Sender.ship`."""
        started = time.monotonic()
        ship = self._book.start(ticket)
        try:
            block_bytes = check_ship(spans, generations, self._memory.nbytes, band)
            if spans:
                receiver = self._exchange.find(address)
                part = Part(ship.number, 0, 1, [(span.target, span.nbytes) for span in spans], generations)
                window = receiver.book.claim(ticket, self._name, len(spans), len(generations))
                window.admit(part, started)
                await self._deliver(ship, receiver, window, part, spans, block_bytes)
        finally:
            self._book.finish(ship)
        return ShipReport(sum(span.nbytes for span in spans), len(spans), time.monotonic() - started)

    async def _deliver(
        self,
        ship: Ship,
        receiver: InprocReceiver,
        window: OpenWindow,
        part: Part,
        spans: Sequence[Span],
        block_bytes: int,
    ) -> None:
        try:
            for span in spans:
                for done in range(0, span.nbytes, block_bytes):
                    ship.check()
                    self._copy(ship, receiver, window, span, done, min(block_bytes, span.nbytes))
                    await asyncio.sleep(0)
            ship.check()
        except (TransferError, asyncio.CancelledError) as error:
            window.abandon(part, error if isinstance(error, TransferError) else ChannelLost("the ship was cancelled"))
            raise
        landed = window.complete(part, time.monotonic())
        assert landed is not None, "the only part"
        window.report(landed)

    def _copy(
        self, ship: Ship, receiver: InprocReceiver, window: OpenWindow, span: Span, done: int, nbytes: int
    ) -> None:
        if not window.gate.enter():
            raise TicketRejected("the window is closed")
        try:
            read_allowed = ship.gate.enter()
            assert read_allowed, "a ship is stopped on the loop that copies it"
            source, target = span.source + done, span.target + done
            receiver.memory[target : target + nbytes] = self._memory[source : source + nbytes]
            ship.gate.leave()
        finally:
            window.gate.leave()

    async def abort(self, ticket: bytes) -> None:
        """See :meth:`Sender.abort`."""
        await self._book.abort(ticket)

    async def close(self) -> None:
        """See :meth:`Sender.close`."""
        await self._book.close()
        self._memory = memoryview(b"")


def receiver(bind: str, memory: memoryview, config: TransportConfig) -> Receiver:
    """A receiver named by ``bind``; nothing in ``config`` concerns this transport."""
    del config
    return InprocReceiver(bind, memory)


def sender(memory: memoryview, config: TransportConfig) -> Sender:
    """A sender; of ``config`` only the name concerns this transport."""
    return InprocSender(memory, config.name)
