"""The sender's connection to one receiver. Lives on the event loop.

Life cycle: made (connected, the hello sent) -> opened (welcomed) -> lost, with everything that waits on it. Frames of
many ships may be under way; the receiver answers each.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import cast

from kv_transfer.shm import endpoint, sealed, wire
from protocol.errors import ChannelLost, KVFerryError, MalformedFrame, TicketRejected

LOOKS_PER_TIMEOUT = 8


class Channel(asyncio.Protocol):
    """See the module.

    Args:
        address: of the receiver.
        pool: descriptor of the memory that ships are read from.
        pool_bytes: its length.
        ledger: descriptor of the ledger.
        timeout: seconds without progress after which the receiver is given up.
        copied: bytes that the receiver has copied of the ship with this ledger slot.
        on_lost: called once, when nothing can be sent any more.

    Attributes:
        opened: finished when the receiver has welcomed us, or the channel is lost.

    Raises:
        ChannelLost: nobody is there.
        ConfigError: the address is malformed.
    """

    def __init__(
        self,
        address: str,
        pool: int,
        pool_bytes: int,
        ledger: int,
        timeout: float,
        copied: Callable[[int], int],
        on_lost: Callable[[Channel], None],
    ) -> None:
        self.address = address
        self._timeout = timeout
        self._copied = copied
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._waiting: dict[int, tuple[int, asyncio.Future[None]]] = {}
        self._heard = bytearray()
        self._error: KVFerryError | None = None
        self._transport: asyncio.Transport | None = None
        self._seen: tuple[int, int] = (0, 0)
        self._answers = 0
        self._still_since = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        connection = endpoint.connect(address)
        try:
            self._greet(connection, pool, pool_bytes, ledger)
        except BaseException:
            connection.close()
            raise
        self._watch()
        self._attaching = self._loop.create_task(self._attach(connection))

    def _greet(self, connection: socket.socket, pool: int, pool_bytes: int, ledger: int) -> None:
        # File descriptions of their own: the pool's cannot write, and the ledger's has its own locks.
        given = [sealed.reopen(pool, writable=False)]
        try:
            given.append(sealed.reopen(ledger, writable=True))
            socket.send_fds(connection, [wire.pack_hello(pool_bytes)], given)
        except OSError as error:
            raise ChannelLost(f"cannot greet {self.address}: {error}") from error
        finally:
            for descriptor in given:
                os.close(descriptor)

    async def _attach(self, connection: socket.socket) -> None:
        try:
            await self._loop.create_unix_connection(lambda: self, sock=connection)
        except (OSError, asyncio.CancelledError) as error:
            connection.close()
            self.connection_lost(None)
            if isinstance(error, asyncio.CancelledError):
                raise

    def send(self, ship: int, slot: int, frame: bytes, done: asyncio.Future[None]) -> None:
        """Send a ship's frame; ``done`` is finished with its answer, or when the channel is lost."""
        assert self._transport is not None, "opened first"
        if self._error is not None:
            done.set_exception(self._located(self._error))
            return
        if not self._waiting:
            self._still_since = self._loop.time()
        self._waiting[ship] = (slot, done)
        self._transport.write(frame)
        if self._timer is None:
            self._watch()

    def forget(self, ship: int) -> None:
        """The ship's answer is not waited for any more."""
        self._waiting.pop(ship, None)

    async def close(self) -> None:
        """Give the connection up and wait until it is gone."""
        self.lose(ChannelLost("the sender is closed"))
        await asyncio.gather(self._attaching, return_exceptions=True)
        if self._transport is not None:
            self._transport.abort()
        await self._gone

    def lose(self, error: KVFerryError) -> None:
        """Fail everything that waits; the first error stays."""
        if self._error is not None:
            return
        self._error = error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, {}
        for future in (self.opened, *[done for _, done in waiting.values()]):
            if not future.done():
                future.set_exception(self._located(error))
        if not self.opened.cancelled():
            # Ships that wait for it have their own copy; nobody may be waiting at all.
            self.opened.exception()
        if self._transport is not None:
            self._transport.abort()
        self._on_lost(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        # uvloop's have the methods, and not the base class.
        self._transport = cast("asyncio.Transport", transport)
        if self._error is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        if not self._gone.done():
            self._gone.set_result(None)
        self.lose(ChannelLost("the receiver closed the connection" if exc is None else f"connection lost: {exc}"))

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        self._heard += data
        try:
            while self._error is None and self._take_one():
                pass
        except KVFerryError as error:
            self.lose(error)

    def _take_one(self) -> bool:
        kind = wire.ANSWER if self.opened.done() else wire.WELCOME
        if len(self._heard) < kind.size:
            return False
        head = bytes(self._heard[: kind.size])
        if self.opened.done():
            ship, refused, length = wire.parse_answer(head)
        else:
            refused, length = wire.parse_welcome(head)
            ship = 0
        end = kind.size + length
        if len(self._heard) < end:
            return False
        reason = self._heard[kind.size : end].decode(errors="replace")
        del self._heard[:end]
        self._answers += 1
        if kind is wire.WELCOME:
            if refused:
                raise MalformedFrame(f"the receiver turned us away: {reason}")
            self.opened.set_result(None)
            return True
        _, done = self._waiting.pop(ship, (0, None))
        # A ship that was withdrawn is answered, too, and nobody waits for it any more.
        if done is not None and not done.done():
            if refused:
                done.set_exception(self._located(TicketRejected(f"the receiver refused: {reason}")))
            else:
                done.set_result(None)
        return True

    def _watch(self) -> None:
        now = self._loop.time()
        seen = (self._answers, sum(self._copied(slot) for slot, _ in self._waiting.values()))
        if seen != self._seen:
            self._seen, self._still_since = seen, now
        if self.opened.done() and not self._waiting:
            self._timer = None
            return
        if now - self._still_since >= self._timeout:
            self._timer = None
            self.lose(ChannelLost(f"no progress for {self._timeout} seconds"))
            return
        self._timer = self._loop.call_later(self._timeout / LOOKS_PER_TIMEOUT, self._watch)

    def _located(self, error: KVFerryError) -> KVFerryError:
        return type(error)(f"{self.address}: {error.message}", field=error.field)
