"""The sender's connection to one receiver. Lives on the event loop.

Life cycle: made (connected) -> opened (both ends have proved themselves, our memory is welcome) -> lost, with all that
waits on it. Frames of many ships may be under way; the receiver answers each.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from kv_transfer import hello
from kv_transfer.shm import endpoint, sealed, wire
from kv_transfer.shm.source import Source
from kv_transfer.shm.wire import Verdict
from kv_transfer.transport import TransportConfig
from protocol.errors import ChannelLost, IntegrityMismatch, KVFerryError, TicketRejected

LOOKS_PER_TIMEOUT = 8


class Channel(asyncio.Protocol):
    """See the module.

    Args:
        address: of the receiver.
        source: the memory that ships are read from.
        ledger: descriptor of the ledger.
        config: timeout is after how many seconds without progress the receiver is given up.
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
        source: Source,
        ledger: int,
        config: TransportConfig,
        copied: Callable[[int], int],
        on_lost: Callable[[Channel], None],
    ) -> None:
        self.address = address
        self._config = config
        self._timeout = config.timeout
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
        self._source = source
        self._ledger = ledger
        self._connection = endpoint.connect(address)
        self._watch()
        self._attaching = self._loop.create_task(self._attach())

    async def _greet(self) -> None:
        party = hello.Party(self._source.scheme, self._source.versions, self._config)
        talk = hello.greet(party)
        heard: bytes | None = None
        while True:
            try:
                asked = next(talk) if heard is None else talk.send(heard)
            except StopIteration:
                return
            if isinstance(asked, int):
                heard = await self._read(asked)
            else:
                await self._loop.sock_sendall(self._connection, asked)
                heard = b""

    async def _read(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            piece = await self._loop.sock_recv(self._connection, nbytes - len(data))
            if not piece:
                raise ChannelLost("the receiver closed the connection")
            data += piece
        return data

    def _offer(self) -> None:
        words, given = self._source.offer()
        try:
            # An open file description of its own, for that is what has the locks.
            given.append(sealed.reopen(self._ledger, writable=True))
            socket.send_fds(self._connection, [words], given)
        finally:
            for descriptor in given:
                os.close(descriptor)

    async def _attach(self) -> None:
        try:
            await self._greet()
            # Only now: who cannot prove that it knows the secret gets no access to our memory.
            self._offer()
            await self._loop.create_unix_connection(lambda: self, sock=self._connection)
        except (OSError, KVFerryError, asyncio.CancelledError) as error:
            self._connection.close()
            lost = error if isinstance(error, KVFerryError) else ChannelLost(f"connection lost: {error}")
            self.lose(lost)
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
        else:
            # Ends the hello, whatever the receiver does.
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
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
            ship, verdict, length = wire.parse_answer(head)
        else:
            turned_away, length = wire.parse_welcome(head)
            ship, verdict = 0, Verdict.REFUSED if turned_away else Verdict.LANDED
        end = kind.size + length
        if len(self._heard) < end:
            return False
        reason = self._heard[kind.size : end].decode(errors="replace")
        del self._heard[:end]
        self._answers += 1
        if kind is wire.WELCOME:
            if verdict is not Verdict.LANDED:
                raise self._source.refusal(f"the receiver turned us away: {reason}")
            self.opened.set_result(None)
            return True
        _, done = self._waiting.pop(ship, (0, None))
        # A ship that was withdrawn is answered, too, and nobody waits for it any more.
        if done is not None and not done.done():
            if verdict is Verdict.LANDED:
                done.set_result(None)
            else:
                refused = TicketRejected if verdict is Verdict.REFUSED else IntegrityMismatch
                done.set_exception(self._located(refused(f"the receiver refused: {reason}")))
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
