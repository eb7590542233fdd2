"""The prefill side of the shared-memory transports. Receivers do the copying; its one thread reckons checksums, if any.

Life cycle: made -> ships come and go, connections are made when first needed and kept -> closed.

A ship's gate stands for the receiver that reads its bytes: it is entered before the frame goes out, and left when the
receiver has answered or the ledger proves it quiet. A receiver that is stopped (SIGSTOP) in the middle of a batch thus
holds up an abort, and the end of the ship, until it goes on or dies; the blocks wait in quarantine as long.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kv_transfer.band import Band
from kv_transfer.checksum import reckon
from kv_transfer.ships import Ship, ShipBook, check_ship
from kv_transfer.shm import wire
from kv_transfer.shm.channel import Channel
from kv_transfer.shm.ledger import SLOTS, SenderLedger
from kv_transfer.shm.source import Source
from kv_transfer.span import Span
from kv_transfer.transport import Sender, ShipReport, TransportConfig
from protocol.errors import TransferError

FIRST_LOOK, LAST_LOOK = 0.0002, 0.02
"""Seconds between looks at a struck entry that is not quiet; each is twice the one before."""
SUM_ON_LOOP = 256 << 10
"""Up to here a checksum takes less time than handing it to another thread."""

log = logging.getLogger(__name__)


class ShmSender(Sender):
    """See :class:`~kv_transfer.transport.Sender`.

    Args:
        source: what is read; taken over.
        config: timeout is what a receiver has to get on.
    """

    def __init__(self, source: Source, config: TransportConfig) -> None:
        self._source = source
        self._nbytes = source.nbytes
        self._config = config
        self._book = ShipBook()
        self._ledger = SenderLedger()
        self._room = asyncio.Semaphore(SLOTS)
        self._channels: dict[str, Channel] = {}
        self._summing = ThreadPoolExecutor(1, "kv-shm-sum")
        self._closed = self._given_up = False

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
            check_ship(spans, generations, self._nbytes, band)
            if spans:
                async with self._room:
                    await self._deliver(ship, address, spans, generations)
        finally:
            self._book.finish(ship)
        return ShipReport(sum(span.nbytes for span in spans), len(spans), time.monotonic() - started)

    async def _deliver(
        self, ship: Ship, address: str, spans: Sequence[Span], generations: Sequence[tuple[int, int]]
    ) -> None:
        ship.check()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        slot = self._ledger.take(ship.number)

        def stop(error: TransferError) -> None:
            self._ledger.strike(slot)
            if not done.done():
                done.set_exception(error)

        try:
            summed = self._config.checksum
            frame = wire.pack_frame(ship.ticket, ship.number, slot, spans, generations, summed=summed)
            ship.on_stop(stop)
            if summed:
                frame += await self._sum(ship, frame, spans)
            channel = self._channel(address)
            if not channel.opened.done():
                # Only then: asyncio.wait takes a turn of the loop even for what is done.
                await asyncio.wait({channel.opened, done}, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                channel.opened.result()
                await self._await_answer(ship, slot, channel, frame, done)
            done.result()
        finally:
            self._ledger.give_back(slot)
            if not done.cancel() and not done.cancelled():
                done.exception()

    async def _sum(self, ship: Ship, frame: bytes, spans: Sequence[Span]) -> bytes:
        views = self._source.views(spans)
        if sum(span.nbytes for span in spans) <= SUM_ON_LOOP:
            total = reckon(frame, views, ship.gate)
        else:
            loop = asyncio.get_running_loop()
            try:
                total = await loop.run_in_executor(self._summing, reckon, frame, views, ship.gate)
            except asyncio.CancelledError:
                await ship.gate.shut()
                raise
        ship.check()
        assert total is not None, "only stopping a ship shuts its gate"
        return total

    async def _await_answer(
        self, ship: Ship, slot: int, channel: Channel, frame: bytes, done: asyncio.Future[None]
    ) -> None:
        entered = ship.gate.enter()
        assert entered, "stopping a ship finishes its future first"
        try:
            channel.send(ship.number, slot, frame, done)
            await done
        except BaseException:
            # Whatever ended it, the caller may change the source once this has raised.
            self._ledger.strike(slot)
            await self._until_quiet(slot)
            raise
        finally:
            self._ledger.strike(slot)
            channel.forget(ship.number)
            ship.gate.leave()

    async def _until_quiet(self, slot: int) -> None:
        pause = FIRST_LOOK
        cancelled: asyncio.CancelledError | None = None
        while not self._ledger.is_quiet(slot) and not self._given_up:
            try:
                await asyncio.sleep(pause)
            except asyncio.CancelledError as error:
                # Whoever cancels must wait no less than whoever aborts.
                cancelled = error
            pause = min(2 * pause, LAST_LOOK)
        if cancelled is not None:
            raise cancelled

    def _channel(self, address: str) -> Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = Channel(
                address,
                self._source,
                self._ledger.descriptor,
                self._config,
                self._ledger.copied,
                self._lost,
            )
            self._channels[address] = channel
        return channel

    def _lost(self, channel: Channel) -> None:
        if self._channels.get(channel.address) is channel:
            del self._channels[channel.address]

    async def abort(self, ticket: bytes) -> None:
        """See :meth:`Sender.abort`."""
        await self._book.abort(ticket)

    async def close(self) -> None:
        """See :meth:`Sender.close`.

        A receiver that stays stopped in the middle of a batch is waited for ``timeout`` seconds. What it reads after
        that is never taken for whole: its ledger entry is struck.
        """
        if self._closed:
            return
        self._closed = True
        try:
            async with asyncio.timeout(self._config.timeout):
                await self._book.close()
        except TimeoutError:
            log.warning("closed while a receiver that does not move still reads the pool")
            self._given_up = True
            await self._book.close()
        for channel in tuple(self._channels.values()):
            await channel.close()
        self._ledger.close()
        self._summing.shutdown()
        self._source.close()
