"""Blocks that land in another form: reported once they are in the pool, and quiet only when nobody unpacks any more."""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch
from staging_stage import BLOCKS, SOURCE, TICKET, bytes_of, order, pool_of, sequence, until

from decode_worker.landing_memory import LandingMemory, Unpack
from engine.repack import pack, unpack
from engine.shared_memory import allocate
from kv_transfer.conversion import Conversion
from kv_transfer.instructions import Ship
from kv_transfer.landing import Landing
from kv_transfer.staging import Staging
from kv_transfer.transport import Landed, TransportConfig, Window, make_receiver
from protocol.errors import ChannelLost, TransferError
from protocol.wire_layout import WireLayout

WIRE = WireLayout(SOURCE, "bfloat16")


def into(pool: torch.Tensor) -> Unpack:
    return lambda source, wire, blocks: unpack(source, wire, blocks, bytes_of(pool))


class Stage:
    """A staging sender, a landing receiver, and an unpacking that can be held or fail."""

    def __init__(self, scheme: str) -> None:
        self.source, self.target = pool_of(SOURCE, 1), pool_of(SOURCE, 2)
        self.before = self.target.clone()
        memory, descriptor = allocate(1 << 16, "kvferry-test")
        self.staging = Staging(SOURCE, memoryview(memory), descriptor, self._pack, TransportConfig(timeout=5.0))
        self.landing_memory = LandingMemory(into(self.target), WIRE, BLOCKS, keep=False)
        bind = f"{scheme}://127.0.0.1:0" if scheme == "tcp" else f"{scheme}://*"
        inner = make_receiver(bind, self.landing_memory.memory)
        self.landing = Landing(inner, self._unpack, self._discard)
        self.go_on = threading.Event()
        self.go_on.set()
        self.fail = False
        self.unpacking = 0
        self.discarded: list[tuple[int, ...]] = []
        self.landed: list[Landed] = []
        self.broken: list[TransferError] = []

    def _pack(self, conversion: Conversion, target: memoryview) -> None:
        moves, incomplete = conversion.moves, conversion.incomplete
        pack(bytes_of(self.source), SOURCE, moves, target, conversion.target, incomplete)

    def _unpack(self, blocks: tuple[int, ...]) -> None:
        self.unpacking += 1
        assert self.go_on.wait(60.0)
        if self.fail:
            raise ValueError("no such block")
        self.landing_memory.unpack(blocks)

    def _discard(self, blocks: tuple[int, ...]) -> None:
        self.landing_memory.discard(blocks)
        self.discarded.append(blocks)

    def ship(self, ticket: bytes = TICKET) -> Ship:
        made = order(range(20), self.landing.addresses, SOURCE, ticket)
        return Ship(**{name: getattr(made, name) for name in made.__dataclass_fields__} | {"wire_dtype": "bfloat16"})

    def open(self, ship: Ship) -> None:
        window = Window(ship.ticket, ship.target_blocks, ship.generations, ship.wire.block_bytes)
        self.landing.open(window, self.landed.append, lambda _, error: self.broken.append(error))

    def arrived(self, ship: Ship) -> bool:
        got, wanted = (
            sequence(pool, SOURCE, blocks)
            for pool, blocks in ((self.target, ship.target_blocks), (self.source, ship.source_blocks))
        )
        others = [block for block in range(BLOCKS) if block not in ship.target_blocks]
        return torch.equal(got, wanted.bfloat16().float()) and torch.equal(self.target[others], self.before[others])


@asynccontextmanager
async def stage(scheme: str = "inproc") -> AsyncIterator[Stage]:
    made = Stage(scheme)
    try:
        yield made
    finally:
        made.go_on.set()
        await made.staging.close()
        await made.landing.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("staging", "landing"))]


@pytest.mark.parametrize("scheme", ["inproc", "shm", "tcp"])
async def test_a_block_is_reported_when_it_is_in_the_pool(scheme: str) -> None:
    async with stage(scheme) as parts:
        ship = parts.ship()
        parts.open(ship)
        parts.go_on.clear()
        await parts.staging.ship(parts.landing.address, ship)
        await until(lambda: parts.unpacking, "the unpacking")
        assert not parts.landed
        assert torch.equal(parts.target, parts.before)
        parts.go_on.set()
        await until(lambda: parts.landed, "the report")
        assert parts.arrived(ship)
        assert parts.landed[0].nbytes == len(ship.target_blocks) * WIRE.block_bytes
        await parts.landing.close_window(TICKET)
        assert parts.discarded == [ship.target_blocks]


async def test_closing_a_window_waits_for_what_is_being_unpacked() -> None:
    async with stage() as parts:
        ship = parts.ship()
        parts.open(ship)
        parts.go_on.clear()
        await parts.staging.ship(parts.landing.address, ship)
        await until(lambda: parts.unpacking, "the unpacking")
        closers = [asyncio.create_task(parts.landing.close_window(TICKET)) for _ in range(2)]
        await asyncio.wait(closers, timeout=0.05)
        assert not any(task.done() for task in closers), "the pool is still written"
        parts.go_on.set()
        await asyncio.gather(*closers)
        assert parts.arrived(ship)
        assert parts.discarded == [ship.target_blocks]
        # The blocks may be in another window at once, whose bytes nobody discards.
        again = parts.ship(b"s" * 16)
        parts.open(again)
        parts.source.mul_(2)
        await parts.staging.ship(parts.landing.address, again)
        await until(lambda: len(parts.landed) == 2, "the second report")
        assert parts.arrived(again)


async def test_what_cannot_be_unpacked_breaks_the_import() -> None:
    async with stage() as parts:
        ship = parts.ship()
        parts.open(ship)
        parts.fail = True
        await parts.staging.ship(parts.landing.address, ship)
        await until(lambda: parts.broken, "the complaint")
        assert "no such block" in parts.broken[0].message
        assert not parts.landed
        await parts.landing.close_window(TICKET)


async def test_closing_waits_for_what_is_being_unpacked_and_ends_the_thread() -> None:
    async with stage() as parts:
        ship = parts.ship()
        parts.open(ship)
        parts.go_on.clear()
        await parts.staging.ship(parts.landing.address, ship)
        await until(lambda: parts.unpacking, "the unpacking")
        closing = asyncio.create_task(parts.landing.close())
        await asyncio.wait([closing], timeout=0.05)
        assert not closing.done()
        parts.go_on.set()
        await closing
        await parts.landing.close()
        await parts.landing.close_window(TICKET)
        with pytest.raises(ChannelLost):
            parts.open(parts.ship(b"s" * 16))


@pytest.mark.parametrize("keep", [False, True])
def test_pages_of_what_is_unpacked_go_back_to_the_system(keep: bool) -> None:
    pool = pool_of(SOURCE, 1)
    memory = LandingMemory(into(pool), WIRE, BLOCKS, keep=keep)
    assert memory.memory.nbytes == BLOCKS * WIRE.block_bytes
    memory.memory[:] = b"x" * memory.memory.nbytes
    # 256 elements, 512 bytes to a block: blocks 5 ... 21 begin and end within a page, with a whole one between.
    memory.discard([21, *range(5, 21)])
    kept = bytes(memory.memory)
    first, last = 5 * WIRE.block_bytes, 22 * WIRE.block_bytes
    begin, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
    assert end > begin
    wanted = b"x" * begin + (b"x" if keep else b"\0") * (end - begin) + b"x" * (len(kept) - end)
    assert kept == wanted
