"""Staging: what arrives is right, memory is bounded, and a ship that has ended reads the pool no more."""

from __future__ import annotations

import asyncio
import os

import pytest
from staging_stage import BLOCKS, SOURCE, TARGET, TICKET, WIRE, order, stage, until

from kv_transfer.staging import pieces
from protocol.errors import ChannelLost, LayoutMismatch, TicketRejected
from protocol.layout import KVLayout

TOKENS = range(6, 57)


def test_pieces_are_the_ship_in_order() -> None:
    ship = order(TOKENS, ("a",))
    for blocks in (1, 2, 3, 50):
        found = list(pieces(ship, SOURCE.block_size, blocks * WIRE.block_bytes))
        assert [block for piece in found for block in piece.target_blocks] == list(ship.target_blocks)
        assert [each for piece in found for each in piece.generations] == list(ship.generations)
        assert [token for piece in found for token in piece.tokens] == list(TOKENS)
        assert max(len(piece.target_blocks) for piece in found) <= blocks
        for piece in found:
            # Block i of the source holds tokens 4i ... 4i + 3 and is number 23 - i.
            assert [BLOCKS - 1 - block for block in piece.source_blocks] == sorted({each // 4 for each in piece.tokens})
    assert len(list(pieces(ship, SOURCE.block_size, 1))) == len(ship.target_blocks)


@pytest.mark.parametrize("scheme", ["inproc", "shm", "tcp"])
@pytest.mark.parametrize("tokens", [TOKENS, range(12), range(12, 13)])
async def test_tokens_arrive_by_each_transport(scheme: str, tokens: range) -> None:
    # Room for four blocks: each piece is one.
    async with stage(scheme, 4 * WIRE.block_bytes) as parts:
        ship = order(tokens, (parts.receiver.address,))
        parts.open(ship)
        report = await parts.staging.ship(parts.receiver.address, ship)
        await until(lambda: sum(len(each.blocks) for each in parts.landed) == len(ship.target_blocks), "all of it")
        assert parts.arrived(ship)
        assert report.nbytes == sum(each.nbytes for each in parts.landed) == len(ship.target_blocks) * WIRE.block_bytes
        assert parts.packed == len(ship.target_blocks)
        assert parts.staging._room.used == 0


async def test_neighbours_travel_as_one_span() -> None:
    async with stage() as parts:
        ship = order(range(36), (parts.receiver.address,))
        parts.open(ship)
        # Blocks 1 2, 4 5, 7 8.
        assert (await parts.staging.ship(parts.receiver.address, ship)).spans == 3


async def test_many_ships_share_the_memory() -> None:
    async with stage("tcp", 3 * WIRE.block_bytes) as parts:
        address = parts.receiver.address
        whole = order(range(90), (address,))
        ships = []
        for index in range(5):
            tokens = range(18 * index, 18 * index + 18)
            part = order(tokens, (address,), ticket=bytes([index]) * 16)
            places = slice(3 * index, 3 * index + 3)
            ship = type(part)(
                **{name: getattr(part, name) for name in part.__dataclass_fields__}
                | {"target_blocks": whole.target_blocks[places], "generations": whole.generations[places]}
            )
            parts.open(ship)
            ships.append(ship)
        await asyncio.gather(*(parts.staging.ship(address, ship) for ship in ships))
        assert parts.arrived(whole)


async def test_an_aborted_ship_packs_no_more_and_has_ended_when_it_raises() -> None:
    async with stage("tcp", 4 * WIRE.block_bytes) as parts:
        ship = order(TOKENS, (parts.receiver.address,))
        parts.open(ship)
        parts.go_on.clear()
        task = asyncio.create_task(parts.staging.ship(parts.receiver.address, ship))
        await until(lambda: parts.packing == 1, "the first piece")
        await parts.staging.abort(TICKET)
        assert not task.done(), "the pool is still read"
        parts.go_on.set()
        with pytest.raises(ChannelLost):
            await task
        assert (parts.packing, parts.packed) == (1, 1)
        assert parts.staging._room.used == 0
        assert not parts.landed


async def test_an_abort_reaches_a_ship_that_waits_for_room() -> None:
    async with stage("inproc", WIRE.block_bytes * 2) as parts:
        address = parts.receiver.address
        first, second = order(range(6), (address,)), order(range(6), (address,), ticket=b"s" * 16)
        large = KVLayout(num_layers=2, kv_heads=2, head_dim=8, block_size=12, dtype="float32")
        third = order(range(12), (address,), large, ticket=b"u" * 16)
        parts.open(first)
        parts.go_on.clear()
        tasks = [asyncio.create_task(parts.staging.ship(address, each)) for each in (first, third, second)]
        await until(lambda: parts.packing == 1 and len(parts.staging._room._waiters) == 2, "two that wait")
        await parts.staging.abort(third.ticket)
        with pytest.raises(ChannelLost, match="aborted"):
            await tasks[1]
        parts.go_on.set()
        await tasks[0]
        with pytest.raises(TicketRejected):
            await tasks[2]


async def test_a_cancelled_ship_waits_for_its_packing() -> None:
    async with stage() as parts:
        ship = order(TOKENS, (parts.receiver.address,))
        parts.open(ship)
        parts.go_on.clear()
        task = asyncio.create_task(parts.staging.ship(parts.receiver.address, ship))
        await until(lambda: parts.packing == 1, "the first piece")
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=0.05)
        assert not task.done()
        parts.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert parts.packed == 1
        assert parts.staging._room.used == 0


async def test_a_piece_that_fails_ends_its_ship_and_no_other() -> None:
    async with stage("tcp", 4 * WIRE.block_bytes) as parts:
        address = parts.receiver.address
        unknown, known = order(range(60), (address,), ticket=b"?" * 16), order(TOKENS, (address,))
        parts.open(known)
        results = await asyncio.gather(
            parts.staging.ship(address, unknown), parts.staging.ship(address, known), return_exceptions=True
        )
        assert isinstance(results[0], TicketRejected)
        assert parts.arrived(known)


async def test_closing_ends_ships_and_gives_everything_back() -> None:
    async with stage("tcp", 4 * WIRE.block_bytes) as parts:
        ship = order(TOKENS, (parts.receiver.address,))
        parts.open(ship)
        descriptor = parts.staging._descriptor
        assert descriptor is not None
        parts.go_on.clear()
        task = asyncio.create_task(parts.staging.ship(parts.receiver.address, ship))
        await until(lambda: parts.packing == 1, "the first piece")
        closing = asyncio.create_task(parts.staging.close())
        await asyncio.sleep(0)
        parts.go_on.set()
        await closing
        with pytest.raises(ChannelLost):
            await task
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
        with pytest.raises(ChannelLost):
            await parts.staging.ship(parts.receiver.address, ship)


async def test_a_block_longer_than_the_memory_is_refused_with_both_numbers() -> None:
    async with stage("inproc", 256) as parts:
        ship = order(range(6), (parts.receiver.address,))
        with pytest.raises(LayoutMismatch, match=f"{WIRE.block_bytes} bytes does not fit the staging memory of 256"):
            await parts.staging.ship(parts.receiver.address, ship)


async def test_a_geometry_that_cannot_be_converted_is_refused() -> None:
    other = KVLayout(num_layers=2, kv_heads=2, head_dim=4, block_size=6, dtype="float32")
    async with stage() as parts:
        with pytest.raises(LayoutMismatch, match="head_dim: 8 here, 4 there"):
            await parts.staging.ship(parts.receiver.address, order(range(6), (parts.receiver.address,), other))


def test_the_case_is_one_of_different_layouts() -> None:
    assert SOURCE.differences(TARGET)
    assert not SOURCE.geometry_differences(TARGET)
