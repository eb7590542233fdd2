"""Bytes that really change on their way, by each transport."""

import asyncio
import ctypes
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from kv_transfer.carried import serving
from kv_transfer.carried.staging import Bytes, Piece
from kv_transfer.shm.copying import HostCopier, Run
from kv_transfer.tcp.address import parse
from kv_transfer.ucx.channel import Channel, Stop

LONG = 512
"""Bytes of a piece that holds more than a hello."""


class Relay:
    """Stands between a sender and a receiver of ``tcp``, and flips a bit of what comes.

    Attributes:
        damage_at: at which byte from now on; None leaves everything as it is.
        strikes: flips a bit in the end of the next long piece.
    """

    def __init__(self, target: str) -> None:
        self.damage_at: int | None = None
        self.strikes = False
        self.connections = 0
        self.address = ""
        self._target = target
        self._tasks: list[asyncio.Task[None]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there, back = await asyncio.open_connection(*parse(self._target))
        self._tasks.append(asyncio.create_task(self._pass(there, writer)))
        await self._pass(reader, back, may_damage=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, may_damage: bool = False) -> None:
        try:
            while piece := await reader.read(1 << 16):
                writer.write(self._damaged(piece) if may_damage else piece)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    def _damaged(self, piece: bytes) -> bytes:
        at = None
        if self.damage_at is not None:
            if self.damage_at < len(piece):
                at, self.damage_at = self.damage_at, None
            else:
                self.damage_at -= len(piece)
        elif self.strikes and len(piece) >= LONG:
            at, self.strikes = len(piece) - LONG // 2, False
        if at is None:
            return piece
        damaged = bytearray(piece)
        damaged[at] ^= 1
        return bytes(damaged)


@asynccontextmanager
async def relay(target: str) -> AsyncIterator[Relay]:
    made = Relay(target)
    server = await asyncio.start_server(made.serve, "127.0.0.1")
    made.address = "tcp://{}:{}".format(*server.sockets[0].getsockname())
    try:
        yield made
    finally:
        server.close()
        await server.wait_closed()


class BadMemory:
    """Flips a bit of what a receiver of any transport but ``tcp`` has written, before it looks at the checksum.

    Attributes:
        strikes: do it to what is written next.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.strikes = False
        copy, move, scattered = HostCopier.copy, Channel.move, serving.scatter

        def bad_scatter(slot: Bytes, pool: Bytes, pieces: Sequence[Piece]) -> None:
            scattered(slot, pool, pieces)
            if self.strikes:
                self.strikes = False
                pool[pieces[len(pieces) // 2][0]] ^= 1

        def bad_copy(copier: HostCopier, batch: Sequence[Run], *, summed: bool = False) -> None:
            copy(copier, batch, summed=summed)
            if self.strikes:
                self.strikes = False
                copier._target[batch[len(batch) // 2][1]] ^= 1

        def bad_move(
            channel: Channel, spans: Sequence[tuple[int, int]], stop: Stop, *, receives: bool
        ) -> asyncio.Future[int]:
            def flip(_: object = None) -> None:
                ctypes.c_ubyte.from_address(spans[len(spans) // 2][0]).value ^= 1

            quiet = move(channel, spans, stop, receives=receives)
            if receives and self.strikes:
                self.strikes = False
                if quiet.done():
                    flip()
                else:
                    # The first of its callbacks: nobody has looked at the bytes before.
                    quiet.add_done_callback(flip)
            return quiet

        patch.setattr(HostCopier, "copy", bad_copy)
        patch.setattr(Channel, "move", bad_move)
        patch.setattr(serving, "scatter", bad_scatter)


@asynccontextmanager
async def damage(scheme: str, address: str) -> AsyncIterator[tuple[str, Relay | BadMemory]]:
    """What may strike on the way to ``address``, and the address that leads through it."""
    if scheme == "tcp":
        async with relay(address) as between:
            yield between.address, between
    else:
        with pytest.MonkeyPatch.context() as patch:
            yield address, BadMemory(patch)
