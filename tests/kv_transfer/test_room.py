"""Room in a bounded memory: never twice, first come first served, and given back whatever happens."""

from __future__ import annotations

import asyncio
import random

import pytest

from kv_transfer.room import ALIGNMENT, Room
from protocol.errors import ChannelLost, LayoutMismatch

TICKET = b"t"


async def waiting(room: Room, nbytes: int, ticket: bytes = TICKET) -> asyncio.Task[int]:
    task = asyncio.create_task(room.take(nbytes, ticket))
    await asyncio.sleep(0)
    return task


async def test_rooms_never_overlap_and_all_of_it_comes_back() -> None:
    rng = random.Random(1)
    room = Room(64 * ALIGNMENT)
    held: dict[int, int] = {}
    tasks: dict[asyncio.Task[int], int] = {}
    for _ in range(2000):
        if rng.random() < 0.5:
            nbytes = rng.randint(1, 20 * ALIGNMENT)
            tasks[await waiting(room, nbytes)] = nbytes
        elif held:
            offset = rng.choice(list(held))
            del held[offset]
            room.give_back(offset)
        await asyncio.sleep(0)
        for task in [each for each in tasks if each.done()]:
            held[task.result()] = tasks.pop(task)
        ends = 0
        for offset in sorted(held):
            assert offset >= ends
            assert offset % ALIGNMENT == 0
            ends = offset + held[offset]
        assert ends <= room.nbytes
    while held or tasks:
        for offset in list(held):
            del held[offset]
            room.give_back(offset)
        await asyncio.sleep(0)
        for task in [each for each in tasks if each.done()]:
            held[task.result()] = tasks.pop(task)
    assert room.used == 0


async def test_a_large_one_is_not_starved_by_small_ones() -> None:
    room = Room(4 * ALIGNMENT)
    first = await room.take(ALIGNMENT, TICKET)
    large = await waiting(room, 4 * ALIGNMENT)
    small = await waiting(room, 1)
    assert not large.done()
    assert not small.done()
    room.give_back(first)
    room.give_back(await large)
    room.give_back(await small)
    assert room.used == 0


async def test_what_will_never_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(LayoutMismatch, match="a block of 257 bytes does not fit the staging memory of 256"):
        await Room(256).take(257, TICKET)


async def test_refusing_a_ticket_lets_the_next_in() -> None:
    room = Room(4 * ALIGNMENT)
    first = await room.take(2 * ALIGNMENT, TICKET)
    stuck = await waiting(room, 4 * ALIGNMENT, b"stuck")
    small = await waiting(room, ALIGNMENT)
    room.refuse(b"stuck")
    with pytest.raises(ChannelLost):
        await stuck
    second = await small
    room.give_back(first)
    room.give_back(second)
    assert room.used == 0


@pytest.mark.parametrize("served", [False, True])
async def test_who_is_cancelled_leaves_nothing_taken(served: bool) -> None:
    room = Room(4 * ALIGNMENT)
    first = await room.take(ALIGNMENT, TICKET)
    waiter = await waiting(room, 4 * ALIGNMENT)
    behind = await waiting(room, ALIGNMENT)
    if served:
        # The room is given in the same turn of the loop in which its taker is cancelled.
        room.give_back(first)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    room.give_back(await behind)
    if not served:
        room.give_back(first)
    assert room.used == 0
