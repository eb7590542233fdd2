"""Ships that write a band of each block: what every transport does with them, and what its book refuses."""

import asyncio

import numpy as np
import pytest
from ferry import GENERATION, ONE_STREAM, POISON, Harbor, Quay, until

from kv_transfer import windows
from kv_transfer.band import Band
from kv_transfer.span import Span
from kv_transfer.transport import Landed, ShipReport, Window
from kv_transfer.windows import OpenWindow, Part, WindowBook
from protocol.errors import ChannelLost, IntegrityMismatch, TicketRejected, TransferError

BLOCK = 4096
LARGE = 1 << 20


async def ship(
    here: Quay, there: Harbor, ticket: bytes, pairs: list[tuple[int, int]], begin: int, end: int
) -> ShipReport:
    """Ship bytes ``[begin, end)`` of ``(source, destination)`` blocks."""
    size = here.block_bytes
    spans = [Span(source * size + begin, target * size + begin, end - begin) for source, target in pairs]
    named = [(target, GENERATION) for _, target in pairs]
    return await here.sender.ship(there.address, ticket, spans, named, band=Band(begin, end, size))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
async def test_blocks_land_with_the_last_of_their_bands(scheme, harbor, quay, order):
    here, there = quay(scheme, 8, BLOCK), harbor(scheme, 8, BLOCK)
    cuts = [(0, 1024), (1024, 3000), (3000, BLOCK)]
    pairs = [(0, 3), (1, 4), (7, 1)]
    ticket = there.open([1, 3, 4, 6])
    for count, index in enumerate(order, 1):
        begin, end = cuts[index]
        report = await ship(here, there, ticket, pairs, begin, end)
        assert (report.nbytes, report.spans) == (3 * (end - begin), 3)
        await until(lambda count=count: len(there.landed) == count)
        assert (there.pool[[3, 4, 1], begin:end] == here.pool[[0, 1, 7], begin:end]).all()
    assert [sorted(landed.blocks) for landed in there.landed] == [[], [], [1, 3, 4]]
    assert sum(landed.nbytes for landed in there.landed) == 3 * BLOCK
    expected = np.full_like(there.pool, POISON)
    expected[[3, 4, 1]] = here.pool[[0, 1, 7]]
    assert (there.pool == expected).all()
    assert not there.broken


async def test_bands_side_by_side_and_whole_blocks_beside_them(scheme, harbor, quay):
    here, there = quay(scheme, 16, 16 << 10), harbor(scheme, 16, 16 << 10)
    ticket = there.open(range(16))
    banded = [(block, block) for block in range(12)]
    step = 4 << 10
    await asyncio.gather(
        *[ship(here, there, ticket, banded, begin, begin + step) for begin in range(0, 16 << 10, step)],
        here.ship(there.address, ticket, [(block, block) for block in range(12, 16)]),
    )
    await until(lambda: len(there.landed) == 5)
    assert sorted(block for landed in there.landed for block in landed.blocks) == list(range(16))
    assert sum(landed.nbytes for landed in there.landed) == there.pool.nbytes
    assert (there.pool == here.pool).all()


async def test_large_bands_travel_in_several_parts(scheme, harbor, quay):
    here, there = quay(scheme, 24, LARGE), harbor(scheme, 24, LARGE)
    ticket = there.open(range(24))
    pairs = [(23 - block, block) for block in range(24)]
    await ship(here, there, ticket, pairs, LARGE // 4, LARGE)
    await ship(here, there, ticket, pairs, 0, LARGE // 4)
    await until(lambda: len(there.landed) == 2)
    assert [len(landed.blocks) for landed in there.landed] == [0, 24]
    assert (there.pool == here.pool[::-1]).all()


@pytest.mark.parametrize("second", [(0, 1024), (1023, 2048), (512, 600), (0, BLOCK)])
async def test_no_byte_is_written_twice(scheme, harbor, quay, second):
    here, there = quay(scheme, 4, BLOCK), harbor(scheme, 4, BLOCK)
    ticket = there.open([1, 2])
    await ship(here, there, ticket, [(1, 1)], 0, 1024)
    there.poison()
    with pytest.raises(TicketRejected, match="block 1 has been written"):
        await ship(here, there, ticket, [(1, 1)], *second)
    assert there.poisoned
    # The refusal costs nothing else: the block's other bytes, and other blocks, are still to be had.
    await ship(here, there, ticket, [(1, 1)], 1024, BLOCK)
    await here.ship(there.address, ticket, [(2, 2)])
    await until(lambda: len(there.landed) == 3)
    assert [landed.blocks for landed in there.landed] == [(), (1,), (2,)]
    with pytest.raises(TicketRejected, match="block 2 has been written"):
        await ship(here, there, ticket, [(2, 2)], 0, 8)


@pytest.mark.parametrize("fault", ["outside", "generation", "closed"])
async def test_a_band_is_refused_as_a_block_is(scheme, harbor, quay, fault):
    here, there = quay(scheme, 4, BLOCK), harbor(scheme, 4, BLOCK)
    ticket = there.open([1, 2])
    generation, block, words = GENERATION, 1, "unknown or closed ticket"
    match fault:
        case "outside":
            block, words = 3, "block 3 is not in the window"
        case "generation":
            generation, words = GENERATION + 1, "of generation 7, the ship says 8"
        case "closed":
            await there.receiver.close_window(ticket)
    span = Span(0, block * BLOCK + 8, 8)
    with pytest.raises(TicketRejected, match=words):
        await here.sender.ship(there.address, ticket, [span], [(block, generation)], band=Band(8, 16, BLOCK))
    assert there.poisoned


async def test_bands_that_contradict_themselves_are_refused_by_their_sender(scheme, harbor, quay):
    here, there = quay(scheme, 4, BLOCK), harbor(scheme, 4, BLOCK)
    ticket = there.open(range(4))
    band = Band(8, 24, BLOCK)
    for spans, named in (
        ([Span(0, 8, 16)], [0, 1]),
        ([Span(0, 8, 16), Span(0, BLOCK + 9, 16)], [0, 1]),
        ([Span(0, 8, 16), Span(0, BLOCK + 8, 15)], [0, 1]),
        ([Span(0, 8, 2 * BLOCK)], [0]),
        ([Span(4 * BLOCK - 8, 8, 16)], [0]),
        ([Span(0, 8, 16)], []),
    ):
        with pytest.raises(IntegrityMismatch):
            await here.sender.ship(there.address, ticket, spans, [(block, GENERATION) for block in named], band=band)
    with pytest.raises(TransferError):
        await here.sender.ship(there.address, ticket, [Span(0, 8, 16), Span(0, 8, 16)], [(0, 7), (0, 7)], band=band)
    assert there.poisoned


@pytest.mark.parametrize(("begin", "end"), [(-1, 4), (4, 4), (5, 4), (0, 9)])
def test_a_band_lies_within_a_block(begin: int, end: int) -> None:
    with pytest.raises(IntegrityMismatch, match=rf"\[{begin}, {end}\) of a block of 8 bytes"):
        Band(begin, end, 8)


async def test_an_abort_between_bands_leaves_the_block_unlanded(scheme, harbor, quay):
    here, there = quay(scheme, 4, BLOCK, ONE_STREAM), harbor(scheme, 4, BLOCK)
    ticket = there.open([1])
    await ship(here, there, ticket, [(1, 1)], 0, 1024)
    await until(lambda: there.landed)
    await here.sender.abort(ticket)
    with pytest.raises(ChannelLost, match="aborted"):
        await ship(here, there, ticket, [(1, 1)], 1024, BLOCK)
    await there.receiver.close_window(ticket)
    assert [landed.blocks for landed in there.landed] == [()]
    # The same blocks under a fresh ticket begin from nothing.
    fresh = there.open([1])
    await here.sender.ship(there.address, fresh, [Span(BLOCK, BLOCK, BLOCK)], [(1, GENERATION)])
    await until(lambda: len(there.landed) == 2)
    assert there.landed[1].blocks == (1,)


def test_whole_blocks_cost_the_wire_no_more_than_before() -> None:
    """One span and one name for a run of two blocks: the frame says nothing of bands."""
    from kv_transfer.shm import wire as shm_wire
    from kv_transfer.tcp import wire as tcp_wire
    from kv_transfer.ucx import wire as ucx_wire

    part = Part(1, 0, 1, [(BLOCK, 2 * BLOCK)], [(1, 7), (2, 7)])
    assert len(tcp_wire.pack_frame(bytes(16), part)) == 48 + 16 + 2 * 12
    assert len(ucx_wire.pack_part(bytes(16), part)) == 40 + 16 + 2 * 12
    span = Span(0, BLOCK, 2 * BLOCK)
    assert len(shm_wire.pack_frame(bytes(16), 1, 0, [span], part.generations)) == 40 + 24 + 2 * 12


# --- the book, without a transport --------------------------------------------------------------------------------

SIZE = 8
TICKET = bytes(16)


class Opened:
    def __init__(self) -> None:
        self.landed: list[Landed] = []
        self.book = WindowBook(64)
        self.book.open(Window(TICKET, (1, 2, 3), (5, 5, 5), SIZE), self.landed.append, lambda *_: None)
        self.window: OpenWindow = self.book.find(TICKET)

    def write(self, ship: int, blocks: tuple[int, ...], begin: int, end: int) -> Landed:
        part = band(ship, blocks, begin, end)
        self.window.admit(part, 0.0)
        landed = self.window.complete(part, 1.0)
        assert landed is not None
        return landed


def band(ship: int, blocks: tuple[int, ...], begin: int, end: int, index: int = 0, count: int = 1) -> Part:
    targets = [(block * SIZE + begin, end - begin) for block in blocks]
    return Part(ship, index, count, targets, [(block, 5) for block in blocks])


async def test_bands_reported_in_another_order_than_they_came_in_add_up_all_the_same() -> None:
    opened = Opened()
    written = [opened.write(ship, (1, 2), begin, begin + 4) for ship, begin in ((1, 0), (2, 4))]
    for landed in reversed(written):
        opened.window.report(landed)
    await asyncio.sleep(0)
    # Bytes and blocks agree after each: no block is told of before its bytes are.
    assert [(landed.blocks, landed.nbytes) for landed in opened.landed] == [((), 8), ((1, 2), 8)]


async def test_a_block_may_be_cut_unlike_its_neighbour() -> None:
    opened = Opened()
    for ship, (blocks, begin, end) in enumerate([((1, 2), 0, 4), ((1,), 4, 8), ((2, 3), 4, 8), ((3,), 0, 4)], 1):
        opened.window.report(opened.write(ship, blocks, begin, end))
    await asyncio.sleep(0)
    assert [landed.blocks for landed in opened.landed] == [(), (1,), (2,), (3,)]


async def test_the_parts_of_one_ship_have_one_band() -> None:
    opened = Opened()
    opened.window.admit(band(1, (1,), 0, 4, 0, 2), 0.0)
    with pytest.raises(TicketRejected, match="does not fit the ship"):
        opened.window.admit(band(1, (2,), 0, 5, 1, 2), 0.0)
    with pytest.raises(TicketRejected, match="does not fit the ship"):
        opened.window.admit(Part(1, 1, 2, [(2 * SIZE, SIZE)], [(2, 5)]), 0.0)
    opened.window.admit(band(1, (2,), 0, 4, 1, 2), 0.0)


@pytest.mark.parametrize(
    ("targets", "named"),
    [
        ([(8, 4)], [1, 2]),
        ([(8, 4), (12, 4)], [1, 2]),
        ([(8, 4), (17, 4)], [1, 2]),
        ([(8, 4), (16, 5)], [1, 2]),
        ([(14, 4), (22, 4)], [1, 2]),
        ([(8, 4), (8, 4)], [1, 2]),
        ([(8, 4), (8, 4)], [1, 1]),
        ([(8, 4), (24, 4)], [1, 2]),
        ([(8, 0), (16, 0)], [1, 2]),
        ([(8, 20)], [1, 2, 3]),
    ],
)
async def test_targets_that_are_no_band_of_the_named_blocks(targets: list[tuple[int, int]], named: list[int]) -> None:
    opened = Opened()
    with pytest.raises(TicketRejected):
        opened.window.admit(Part(1, 0, 1, targets, [(block, 5) for block in named]), 0.0)
    opened.write(2, (1, 2, 3), 0, SIZE)


async def test_a_peer_cannot_make_the_book_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "MAX_BANDS", 2)
    opened = Opened()
    opened.write(1, (1,), 0, 1)
    opened.write(2, (1,), 1, 2)
    with pytest.raises(TicketRejected, match="2 different bands"):
        opened.write(3, (1,), 2, 8)
    opened.write(4, (2,), 0, 1)
