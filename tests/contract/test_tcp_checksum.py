"""Checksums on the way: what was changed between two ends fails and never lands."""

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from ferry import GENERATION, until

from kv_transfer.tcp import wire
from kv_transfer.tcp.address import parse
from kv_transfer.transport import TransportConfig
from kv_transfer.windows import Part
from protocol.errors import IntegrityMismatch, MalformedFrame, TicketRejected

BLOCK = 4096
SUMMED = TransportConfig(checksum=True, streams=2)
HELLO = wire.pack_hello()


class Relay:
    """Stands between a sender and a receiver and flips a bit of what comes at ``damage_at``."""

    def __init__(self, target: str) -> None:
        self.damage_at: int | None = None
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
                if may_damage and self.damage_at is not None:
                    if self.damage_at < len(piece):
                        damaged = bytearray(piece)
                        damaged[self.damage_at] ^= 1
                        piece, self.damage_at = bytes(damaged), None
                    else:
                        self.damage_at -= len(piece)
                writer.write(piece)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


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


@pytest.mark.parametrize("count", [1, 7, 64, 512, 4096])
async def test_summed_ships_of_all_sizes_land(harbor, quay, count: int) -> None:
    there, here = harbor("tcp", count, BLOCK, SUMMED), quay("tcp", count, BLOCK, SUMMED)
    await here.ship(there.address, there.open(range(count)), [(count - 1 - i, i) for i in range(count)])
    await until(lambda: there.landed)
    assert (there.pool == here.pool[::-1]).all()


@pytest.mark.parametrize("count", [1, 256])
@pytest.mark.parametrize("where", ["head", "middle", "end"])
async def test_a_bit_flipped_on_the_way_fails_the_ship_and_nothing_else(harbor, quay, count: int, where: str) -> None:
    there, here = harbor("tcp", count, BLOCK, SUMMED), quay("tcp", count, BLOCK, SUMMED)
    async with relay(there.address) as between:
        ticket = there.open(range(count))
        await here.ship(between.address, ticket, [(0, 0)])
        await until(lambda: there.landed)
        await there.receiver.close_window(ticket)
        ticket, connections = there.open(range(count)), between.connections
        tables = len(wire.pack_frame(ticket, Part(1, 0, 1, [(0, BLOCK)] * count, [(0, 0)] * count)))
        size = count * BLOCK
        # The head's ship number: nothing but the checksum guards it.
        offset = {"head": 24, "middle": tables + size // 2, "end": tables + size + 3}[where]
        # A large ship takes the other lane: a new connection, with its hello first.
        between.damage_at = offset + (len(HELLO) if count > 1 else 0)
        pairs = [(i, i) for i in range(count)]
        with pytest.raises((IntegrityMismatch, MalformedFrame) if where == "head" else IntegrityMismatch):
            await here.ship(between.address, ticket, pairs)
        await until(lambda: there.broken)
        assert there.broken[0][0] == ticket
        assert isinstance(there.broken[0][1], IntegrityMismatch)
        assert there.broken[0][1].retryable
        assert len(there.landed) == 1
        await there.receiver.close_window(ticket)
        await here.ship(between.address, there.open(range(count)), pairs)
        await until(lambda: len(there.landed) == 2)
        assert (there.pool == here.pool).all()
        # The connection is still in step, unless the damaged answer made the sender drop it.
        assert between.connections <= connections + (where == "head") + (count > 1)
        await here.sender.close()


async def test_a_refused_summed_frame_leaves_the_connection_in_step(harbor) -> None:
    there = harbor("tcp", 4, BLOCK, SUMMED)
    ticket = there.open([1, 2, 3])

    def frame(block: int, generation: int, flip: int = 0) -> bytes:
        part = Part(block, 0, 1, [(block * BLOCK, BLOCK)], [(block, generation)])
        words = wire.pack_frame(ticket, part, summed=True) + bytes([block]) * BLOCK
        return words + wire.CRC.pack(zlib.crc32(words) ^ flip)

    reader, writer = await asyncio.open_connection(*parse(there.address))
    writer.write(HELLO)
    assert await reader.readexactly(len(HELLO)) == HELLO
    verdicts = []
    for words in (frame(1, GENERATION + 1), frame(1, GENERATION), frame(2, GENERATION, 1), frame(3, GENERATION)):
        writer.write(words)
        answer = wire.ANSWER.unpack(await reader.readexactly(wire.ANSWER.size))
        verdicts.append(answer[3])
        await reader.readexactly(answer[4])
    writer.close()
    await writer.wait_closed()
    refused, damaged, landed = wire.Verdict.REFUSED, wire.Verdict.DAMAGED, wire.Verdict.LANDED
    assert verdicts == [refused, landed, damaged, landed]
    await until(lambda: len(there.landed) == 2)
    assert [landed.blocks for landed in there.landed] == [(1,), (3,)]
    assert [type(error) for _, error in there.broken] == [IntegrityMismatch]


async def test_who_wants_checksums_takes_nothing_without_and_who_does_not_takes_both(harbor, quay) -> None:
    strict, lenient, plain = harbor("tcp", 2, BLOCK, SUMMED), harbor("tcp", 2, BLOCK), quay("tcp", 2, BLOCK)
    ticket = strict.open([0, 1])
    with pytest.raises(TicketRejected, match="nothing without a checksum"):
        await plain.ship(strict.address, ticket, [(0, 1)])
    assert strict.poisoned
    await quay("tcp", 2, BLOCK, SUMMED).ship(strict.address, ticket, [(0, 1)])
    ticket = lenient.open([0, 1])
    await quay("tcp", 2, BLOCK, SUMMED).ship(lenient.address, ticket, [(0, 1)])
    await plain.ship(lenient.address, ticket, [(1, 0)])
