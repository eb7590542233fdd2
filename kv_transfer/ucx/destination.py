"""The sender's channels to one receiver, and the parts that wait for one. Lives in the loop thread.

A channel carries one part at a time, so ending it harms no other ship. Parts that wait fail with the channel that is
lost, for a peer that is dead or stopped would let each of them wait as long.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

from kv_transfer.transport import TransportConfig
from kv_transfer.ucx.loop_thread import settled
from protocol.errors import ChannelLost, KVFerryError, TransferError


class Parcel(Protocol):
    """One part of a ship, as far as the wait for a channel is concerned."""

    @property
    def stopped(self) -> asyncio.Future[TransferError]:
        """Set to the error with which its ship was stopped."""


P = TypeVar("P", bound=Parcel)
Sent = TypeVar("Sent", contravariant=True)


class Line(Protocol[Sent]):
    """A channel that carries parcels, one at a time; it lets go of what it holds when its peer is gone."""

    @property
    def alive(self) -> bool:
        """Whether it may carry another one."""

    async def deliver(self, parcel: Sent, /) -> None:
        """Have the peer take a parcel; raises what :meth:`~kv_transfer.transport.Sender.ship` does."""

    async def close(self) -> None:
        """End it."""


class Destination(Generic[P]):
    """See the module.

    Args:
        address: for messages.
        config: streams bounds the channels.
        open_line: makes one more channel.
    """

    def __init__(self, address: str, config: TransportConfig, open_line: Callable[[], Awaitable[Line[P]]]) -> None:
        self._address = address
        self._config = config
        self._open_line = open_line
        self._idle: list[Line[P]] = []
        self._lines: set[Line[P]] = set()
        self._opening = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def send(self, parcel: P) -> None:
        """Deliver a parcel; when this returns or raises, nobody reads the pool for it any more."""
        try:
            line = await self._line(parcel)
            try:
                await line.deliver(parcel)
            except ChannelLost as error:
                if not line.alive and not parcel.stopped.done():
                    self._fail_waiting(error)
                raise
            finally:
                await self._put_back(line)
        except KVFerryError as error:
            located = type(error)(f"{self._address}: {error.message}", field=error.field)
            raise located from error

    async def close(self) -> None:
        """Close the channels, none of which is in use."""
        for line in tuple(self._lines):
            await line.close()
        self._lines.clear()
        self._idle.clear()

    async def _line(self, parcel: P) -> Line[P]:
        while True:
            if parcel.stopped.done():
                raise parcel.stopped.result()
            while self._idle:
                line = self._idle.pop()
                if line.alive:
                    return line
                await self._put_back(line)
            if len(self._lines) + self._opening < self._config.streams:
                opened = await self._opened(parcel)
                if opened is not None:
                    return opened
                if self._idle:
                    # Put back while this one was opening, when nobody waited for a turn.
                    continue
            await self._turn(parcel)

    async def _opened(self, parcel: P) -> Line[P] | None:
        self._opening += 1
        opening = asyncio.ensure_future(self._open_line())
        try:
            either: set[asyncio.Future[Any]] = {opening, parcel.stopped}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                opening.cancel()
                await settled({opening})
                raise parcel.stopped.result()
            line = opening.result()
        except ChannelLost as error:
            # A receiver may have no room for one more, and hangs up; what waits is then for those that there are. One
            # that says nothing at all would let it wait as long again on any of them.
            silent = isinstance(error.__cause__, TimeoutError)
            if self._lines and not silent and not parcel.stopped.done():
                return None
            if not parcel.stopped.done():
                self._fail_waiting(error)
            raise
        finally:
            self._opening -= 1
            self._wake()
        self._lines.add(line)
        return line

    async def _turn(self, parcel: P) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        either: set[asyncio.Future[Any]] = {turn, parcel.stopped}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if turn.done():
            turn.result()
            if parcel.stopped.done():
                self._wake()
        else:
            self._waiting.remove(turn)

    async def _put_back(self, line: Line[P]) -> None:
        if line.alive:
            self._idle.append(line)
        else:
            self._lines.discard(line)
            await line.close()
        self._wake()

    def _wake(self) -> None:
        if self._waiting:
            self._waiting.popleft().set_result(None)

    def _fail_waiting(self, error: TransferError) -> None:
        waiting, self._waiting = self._waiting, deque()
        for turn in waiting:
            turn.set_exception(ChannelLost(error.message))
