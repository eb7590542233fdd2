"""Ships under way and tickets that were aborted: the sender's book, shared by every transport.

Life cycle of a ship: started -> stopped (at most once: aborted, cancelled or closed) -> finished. While its gate is
open its source bytes may be read.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kv_transfer.band import Band
from kv_transfer.gate import Gate
from kv_transfer.span import Span
from protocol.errors import ChannelLost, IntegrityMismatch, TransferError

MAX_NUMBER = (1 << 64) - 1
MAX_ABORTED = 1 << 16
"""Aborted tickets that are remembered. A ticket is good for one import, so old ones never come again."""


def check_ship(
    spans: Sequence[Span], generations: Sequence[tuple[int, int]], memory_bytes: int, band: Band | None = None
) -> int:
    """Bytes of one block, given that the spans are exactly the named blocks, or a band of them, and lie in the memory.

    Raises:
        IntegrityMismatch: they are not, or do not.
    """
    total = 0
    for span in spans:
        total += span.nbytes
        if span.source + span.nbytes > memory_bytes:
            raise IntegrityMismatch(f"{span} reads outside the memory of {memory_bytes} bytes", field="spans")
    if not generations:
        if total:
            raise IntegrityMismatch(f"{total} bytes to ship and no block is named", field="generations")
        return 0
    if band is not None:
        _check_band(spans, len(generations), band)
        return band.block_bytes
    block_bytes, rest = divmod(total, len(generations))
    if rest or not total:
        raise IntegrityMismatch(f"{total} bytes are not {len(generations)} whole blocks", field="spans")
    for span in spans:
        if span.target % block_bytes or span.nbytes % block_bytes:
            raise IntegrityMismatch(f"{span} is not whole blocks of {block_bytes} bytes", field="spans")
    return block_bytes


def _check_band(spans: Sequence[Span], blocks: int, band: Band) -> None:
    if len(spans) != blocks:
        raise IntegrityMismatch(f"{len(spans)} spans are not one for each of {blocks} blocks", field="spans")
    for span in spans:
        if span.target % band.block_bytes != band.begin or span.nbytes != band.nbytes:
            raise IntegrityMismatch(f"{span} is not {band} of a block", field="spans")


class Ship:
    """One call of ``ship``."""

    __slots__ = ("_on_stop", "error", "gate", "number", "ticket")

    def __init__(self, ticket: bytes, number: int) -> None:
        self.ticket = ticket
        self.number = number
        self.gate = Gate()
        self.error: TransferError | None = None
        self._on_stop: Callable[[TransferError], None] | None = None

    def on_stop(self, callback: Callable[[TransferError], None]) -> None:
        """Have ``callback`` run when the ship is stopped; at once if it has been.

        Raises:
            TransferError: what it was stopped with.
        """
        self._on_stop = callback
        self.check()

    def check(self) -> None:
        """Raise what the ship was stopped with, if it was."""
        if self.error is not None:
            raise self.error

    def stop(self, error: TransferError) -> None:
        """Let no further byte be read; the first error stays."""
        if self.error is None:
            self.error = error
            self.gate.shut_now()
            if self._on_stop is not None:
                self._on_stop(error)


class ShipBook:
    """Every ship of one sender that has not finished."""

    def __init__(self) -> None:
        self._ships: dict[int, Ship] = {}
        self._aborted: OrderedDict[bytes, None] = OrderedDict()
        self._closed = False
        # From a random one on, so that ships of a restarted sender cannot be taken for parts of an old one's.
        self._number = secrets.randbits(64)

    def start(self, ticket: bytes) -> Ship:
        """A new ship.

        Raises:
            ChannelLost: the ticket was aborted, or the sender is closed.
        """
        if self._closed:
            raise ChannelLost("the sender is closed")
        if ticket in self._aborted:
            raise ChannelLost("the ticket was aborted")
        self._number = (self._number + 1) & MAX_NUMBER
        ship = Ship(ticket, self._number)
        self._ships[ship.number] = ship
        return ship

    def finish(self, ship: Ship) -> None:
        """Forget a ship that has returned or raised."""
        del self._ships[ship.number]

    async def abort(self, ticket: bytes) -> None:
        """Stop the ticket's ships, and refuse later ones; returns once none of their bytes is being read."""
        self._aborted[ticket] = None
        self._aborted.move_to_end(ticket)
        if len(self._aborted) > MAX_ABORTED:
            self._aborted.popitem(last=False)
        await self._stop([ship for ship in self._ships.values() if ship.ticket == ticket], "the ship was aborted")

    async def close(self) -> None:
        """Stop every ship, and refuse later ones; returns once no byte is being read."""
        self._closed = True
        await self._stop(list(self._ships.values()), "the sender is closed")

    async def _stop(self, ships: Sequence[Ship], reason: str) -> None:
        for ship in ships:
            ship.stop(ChannelLost(reason))
        for ship in ships:
            await ship.gate.shut()
