"""Parcels that wait for a channel: none waits for one that is there, or for a peer that will not speak."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import pytest

from kv_transfer.transport import TransportConfig
from kv_transfer.ucx.destination import Destination
from protocol.errors import ChannelLost, TransferError

FULL = ConnectionResetError("no room for one more")
SILENT = TimeoutError("not a word")
CLOSED = ConnectionResetError("the peer is gone")


class Parcel:
    def __init__(self) -> None:
        self.stopped: asyncio.Future[TransferError] = asyncio.get_running_loop().create_future()


class Line:
    """A channel that delivers when it is told to."""

    def __init__(self) -> None:
        self.alive = True
        self.carried: list[Parcel] = []
        self.delivered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def deliver(self, parcel: Parcel) -> None:
        self.carried.append(parcel)
        await self.delivered
        self.delivered = asyncio.get_running_loop().create_future()

    def lose(self, error: Exception) -> None:
        self.alive = False
        self.delivered.set_exception(error)

    async def close(self) -> None:
        self.alive = False


class Harbour:
    """Where lines are asked for; each is made, or refused, by the test."""

    def __init__(self) -> None:
        self.asked: deque[asyncio.Future[Line]] = deque()
        config = TransportConfig(streams=2)
        self.destination: Destination[Parcel] = Destination("ucx://there:1", config, self._open)

    async def _open(self) -> Line:
        asked: asyncio.Future[Line] = asyncio.get_running_loop().create_future()
        self.asked.append(asked)
        try:
            return await asked
        except OSError as error:
            raise ChannelLost("cannot connect") from error

    async def opening(self) -> asyncio.Future[Line]:
        await until(lambda: bool(self.asked))
        return self.asked.popleft()

    def send(self) -> tuple[Parcel, asyncio.Task[None]]:
        parcel = Parcel()
        return parcel, asyncio.create_task(self.destination.send(parcel))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 -- the loop has nothing but this to do
            await asyncio.sleep(0)


async def busy(harbour: Harbour) -> tuple[Line, asyncio.Task[None]]:
    """One line, with a parcel under way on it."""
    line = Line()
    parcel, sending = harbour.send()
    (await harbour.opening()).set_result(line)
    await until(lambda: line.carried == [parcel])
    return line, sending


async def test_a_line_that_comes_free_while_another_is_refused_is_taken() -> None:
    harbour = Harbour()
    line, first = await busy(harbour)
    parcel, second = harbour.send()
    opening = await harbour.opening()
    line.delivered.set_result(None)
    await first

    opening.set_exception(FULL)
    await until(lambda: line.carried[1:] == [parcel])
    line.delivered.set_result(None)
    await asyncio.wait_for(second, 60)


async def test_a_line_that_died_idle_while_another_was_refused_ends_the_wait() -> None:
    harbour = Harbour()
    line, first = await busy(harbour)
    _, second = harbour.send()
    opening = await harbour.opening()
    line.delivered.set_result(None)
    await first
    line.alive = False

    opening.set_exception(FULL)
    (await harbour.opening()).set_exception(CLOSED)
    with pytest.raises(ChannelLost, match="ucx://there:1: cannot connect"):
        await asyncio.wait_for(second, 60)


async def test_a_refused_line_leaves_its_parcel_to_wait_for_one_that_is_busy() -> None:
    harbour = Harbour()
    line, first = await busy(harbour)
    parcel, second = harbour.send()
    (await harbour.opening()).set_exception(FULL)
    line.delivered.set_result(None)
    await first
    await until(lambda: line.carried[1:] == [parcel])
    line.delivered.set_result(None)
    await asyncio.wait_for(second, 60)


@pytest.mark.parametrize("free", [True, False])
async def test_a_peer_that_does_not_speak_in_its_time_is_not_given_as_much_again(free: bool) -> None:
    harbour = Harbour()
    line, first = await busy(harbour)
    _, second = harbour.send()
    opening = await harbour.opening()
    if free:
        line.delivered.set_result(None)
        await first

    opening.set_exception(SILENT)
    with pytest.raises(ChannelLost, match="cannot connect"):
        await asyncio.wait_for(second, 60)
    if not free:
        line.delivered.set_result(None)
        await first
    assert len(line.carried) == 1


async def test_parcels_that_wait_fail_with_the_line_that_is_lost() -> None:
    harbour = Harbour()
    line, first = await busy(harbour)
    _, second = harbour.send()
    (await harbour.opening()).set_exception(FULL)
    await until(lambda: bool(harbour.destination._waiting))
    line.lose(ChannelLost("no progress"))
    for sending in (first, second):
        with pytest.raises(ChannelLost, match="no progress"):
            await asyncio.wait_for(sending, 60)
