"""What every KV transport does, run against each of them."""

import asyncio
import os
import secrets
import socket
import weakref

import numpy as np
import pytest
from ferry import BIND, GENERATION, NOBODY, ONE_STREAM, POISON, SHALLOW, Harbor, Quay, as_pool, until
from pace import allowed

from engine.shared_memory import allocate
from kv_transfer.plan import plan
from kv_transfer.span import Span
from kv_transfer.transport import Window, make_receiver, make_sender
from protocol.errors import (
    ChannelLost,
    IntegrityMismatch,
    TicketRejected,
    TransferError,
)
from protocol.layout import KVLayout

BLOCK = 4096
LARGE = 512 << 10
MANY = 64
"""MANY blocks of LARGE bytes: long enough under way to be met in the middle, and two parts where there are streams."""
TRIES = 40
TOO_SOON = "the ship was over too soon every time"


async def meet_midway(harbor: Harbor, quay: Quay) -> tuple[bytes, asyncio.Task[object]]:
    """A ship of the whole pool whose first block has been written and whose last has not."""
    for _ in range(TRIES):
        harbor.poison()
        harbor.landed.clear()
        ticket = harbor.open(range(MANY))
        task = asyncio.create_task(quay.ship(harbor.address, ticket, [(i, i) for i in range(MANY)]))
        await until(lambda task=task: harbor.pool[0, -1] != POISON or task.done())
        if not task.done() and harbor.pool[-1, -1] == POISON:
            return ticket, task
        await task
        await harbor.receiver.close_window(ticket)
    pytest.fail(TOO_SOON)


async def test_bytes_arrive_where_they_belong(scheme, harbor, quay):
    here, there = quay(scheme, 64, BLOCK), harbor(scheme, 80, BLOCK)
    rng = np.random.default_rng(3)
    layout = KVLayout(num_layers=1, kv_heads=1, head_dim=BLOCK // 4, block_size=1, dtype="float16")  # of BLOCK bytes
    for count in (1, 2, 7, 64):
        there.poison()
        there.landed.clear()
        source = [int(block) for block in rng.permutation(64)[:count]]
        target = sorted(int(block) for block in rng.permutation(80)[:count])
        ticket = there.open(target)
        spans = plan(layout, source, layout, target)
        report = await here.sender.ship(there.address, ticket, spans, [(block, GENERATION) for block in target])
        assert (report.nbytes, report.spans) == (count * BLOCK, len(spans))
        assert report.seconds > 0
        await until(lambda: there.landed)
        (landed,) = there.landed
        assert (landed.ticket, landed.nbytes, sorted(landed.blocks)) == (ticket, count * BLOCK, target)
        expected = np.full_like(there.pool, POISON)
        expected[target] = here.pool[source]
        assert (there.pool == expected).all()
        await there.receiver.close_window(ticket)
    assert not there.broken


async def test_a_large_ship_lands_once_and_whole(scheme, harbor, quay):
    here, there = quay(scheme, MANY, LARGE), harbor(scheme, MANY, LARGE)
    ticket = there.open(range(MANY))
    await here.ship(there.address, ticket, [(MANY - 1 - i, i) for i in range(MANY)])
    await until(lambda: there.landed)
    assert sorted(there.landed[0].blocks) == list(range(MANY))
    assert (there.pool == here.pool[::-1]).all()
    assert len(there.landed) == 1


async def test_a_window_is_filled_by_several_ships(scheme, harbor, quay):
    here, there = quay(scheme, 10, BLOCK), harbor(scheme, 10, BLOCK)
    ticket = there.open(range(1, 10))
    for block in range(1, 10):
        await here.ship(there.address, ticket, [(block, block)])
    await until(lambda: len(there.landed) == 9)
    assert [landed.blocks for landed in there.landed] == [(block,) for block in range(1, 10)]
    assert (there.pool[1:] == here.pool[1:]).all()
    assert (there.pool[0] == POISON).all()


async def test_ships_go_side_by_side_to_one_receiver_and_to_several(scheme, harbor, quay):
    here = quay(scheme, 64, 16 << 10)
    ports = [harbor(scheme, 64, 16 << 10) for _ in range(3)]
    jobs = [(there, there.open(range(lot * 8, lot * 8 + 8)), lot * 8) for there in ports for lot in range(8)]
    await asyncio.gather(
        *[here.ship(there.address, ticket, [(i, i) for i in range(first, first + 8)]) for there, ticket, first in jobs]
    )
    for there in ports:
        await until(lambda there=there: len(there.landed) == 8)
        assert (there.pool == here.pool).all()


async def test_several_senders_share_a_receiver(scheme, harbor, quay):
    there = harbor(scheme, 16, BLOCK)
    quays = [quay(scheme, 16, BLOCK) for _ in range(4)]
    tickets = [there.open(range(lot * 4, lot * 4 + 4)) for lot in range(4)]
    await asyncio.gather(
        *[
            here.ship(there.address, ticket, [(i, i) for i in range(lot * 4, lot * 4 + 4)])
            for lot, (here, ticket) in enumerate(zip(quays, tickets, strict=True))
        ]
    )
    assert (there.pool == quays[0].pool).all()


async def test_two_hundred_small_ships(scheme, harbor, quay):
    here, there = quay(scheme, 32, 1024), harbor(scheme, 200, 1024)
    rng = np.random.default_rng(5)
    ticket = there.open(range(200))
    sources = [int(source) for source in rng.integers(0, 32, 200)]
    gate = asyncio.Semaphore(16)

    async def one(target: int) -> None:
        async with gate:
            await here.ship(there.address, ticket, [(sources[target], target)])

    await asyncio.gather(*[one(int(target)) for target in rng.permutation(200)])
    await until(lambda: len(there.landed) == 200)
    assert (there.pool == here.pool[sources]).all()
    assert sorted(block for landed in there.landed for block in landed.blocks) == list(range(200))


async def test_shipping_nothing_is_fine(scheme, harbor, quay):
    here, there = quay(scheme, 1, BLOCK), harbor(scheme, 1, BLOCK)
    report = await here.sender.ship(there.address, there.open([0]), [], [])
    assert (report.nbytes, report.spans) == (0, 0)
    assert there.poisoned


@pytest.mark.parametrize("fault", ["unknown", "closed", "outside", "generation", "twice"])
async def test_the_receiver_refuses_before_a_byte_is_written(scheme, harbor, quay, fault):
    here, there = quay(scheme, 8, LARGE), harbor(scheme, 8, LARGE)
    ticket = there.open([1, 2, 3])
    pairs, generation, words = [(1, 1), (2, 2)], GENERATION, ""
    match fault:
        case "unknown":
            ticket, words = secrets.token_bytes(16), "unknown or closed ticket"
        case "closed":
            await there.receiver.close_window(ticket)
            words = "unknown or closed ticket"
        case "outside":
            pairs, words = [(1, 1), (4, 4)], "block 4 is not in the window"
        case "generation":
            generation, words = GENERATION + 1, "is of generation 7, the ship says 8"
        case "twice":
            await here.ship(there.address, ticket, [(2, 2)])
            there.poison()
            words = "block 2 has been written"
    with pytest.raises(TicketRejected, match=words):
        await here.ship(there.address, ticket, pairs, generation)
    assert there.poisoned
    # The refusal costs nothing else: the same ends go on.
    fresh = there.open([5, 6])
    await here.ship(there.address, fresh, [(1, 6), (2, 5)])
    assert (there.pool[[6, 5]] == here.pool[[1, 2]]).all()


async def test_ships_that_contradict_themselves_are_refused(scheme, harbor, quay):
    here, there = quay(scheme, 4, BLOCK), harbor(scheme, 4, BLOCK)
    ticket = there.open(range(4))
    wrong = [
        ([Span(3 * BLOCK, 0, 2 * BLOCK)], [(0, GENERATION), (1, GENERATION)]),
        ([Span(0, 0, BLOCK)], []),
        ([Span(0, 0, BLOCK)], [(0, GENERATION), (1, GENERATION), (2, GENERATION)]),
        ([Span(0, BLOCK // 2, BLOCK)], [(0, GENERATION)]),
        ([Span(0, 0, BLOCK), Span(0, 0, BLOCK)], [(0, GENERATION), (1, GENERATION)]),
        ([Span(0, 0, BLOCK)], [(1, GENERATION)]),
    ]
    for spans, generations in wrong:
        with pytest.raises((IntegrityMismatch, TicketRejected)):
            await here.sender.ship(there.address, ticket, spans, generations)
    assert there.poisoned


async def closed_midway(harbor: Harbor, quay: Quay) -> asyncio.Task[object]:
    """A ship whose window was closed while it was under way."""
    for _ in range(TRIES):
        ticket, task = await meet_midway(harbor, quay)
        await asyncio.wait_for(harbor.receiver.close_window(ticket), allowed(1.0))
        if (harbor.pool[:, -1] == POISON).any():
            return task
        # It came in whole between the look and the close, and landed if the receiver had noticed that by then.
        await asyncio.gather(task, return_exceptions=True)
    pytest.fail(TOO_SOON)


async def test_closing_a_window_in_mid_ship_stops_every_byte(scheme, harbor, quay):
    here, there = quay(scheme, MANY, LARGE), harbor(scheme, MANY, LARGE)
    for _ in range(3):
        task = await closed_midway(there, here)
        reports = len(there.landed), len(there.broken)
        there.poison()
        with pytest.raises(TicketRejected, match="closed"):
            await task
        assert there.poisoned
        assert (len(there.landed), len(there.broken)) == reports


async def test_a_fresh_window_on_the_same_blocks_right_after_close(scheme, harbor, quay):
    here, other, there = quay(scheme, MANY, LARGE), quay(scheme, MANY, LARGE), harbor(scheme, MANY, LARGE)
    other.pool[:] = 1
    task = await closed_midway(there, here)
    there.landed.clear()
    fresh = there.open(range(MANY))
    await other.ship(there.address, fresh, [(i, i) for i in range(MANY)])
    assert (there.pool == 1).all()
    with pytest.raises(TransferError):
        await task
    assert (there.pool == 1).all()
    await until(lambda: there.landed)
    assert [landed.ticket for landed in there.landed] == [fresh]


async def test_closing_after_a_ship_and_closing_twice(scheme, harbor, quay):
    here, there = quay(scheme, 4, BLOCK), harbor(scheme, 4, BLOCK)
    ticket = there.open([1])
    await here.ship(there.address, ticket, [(0, 1)])
    await asyncio.gather(there.receiver.close_window(ticket), there.receiver.close_window(ticket))
    await there.receiver.close_window(ticket)
    await there.receiver.close_window(secrets.token_bytes(16))
    there.poison()
    with pytest.raises(TicketRejected):
        await here.ship(there.address, ticket, [(0, 1)])
    assert there.poisoned


@pytest.mark.parametrize("config", [SHALLOW, ONE_STREAM], ids=["streams", "one stream"])
async def test_after_an_abort_the_source_may_change(scheme, harbor, quay, config):
    here, there = quay(scheme, MANY, LARGE, config), harbor(scheme, MANY, LARGE)
    before, aborted = here.pool.copy(), 0
    for _ in range(TRIES):
        ticket, task = await meet_midway(there, here)
        await asyncio.wait_for(here.sender.abort(ticket), allowed(1.0))
        here.pool[:] = 1
        (end,) = await asyncio.gather(task, return_exceptions=True)
        if config is ONE_STREAM:
            await until(lambda: there.broken or there.landed)
        await there.receiver.close_window(ticket)
        written = there.pool != POISON
        assert (there.pool[written] == before[written]).all()
        # The last bytes may have been in the sockets already; then, and only then, it is whole.
        assert written.all() or not there.landed
        assert {lost for lost, _ in there.broken} <= {ticket}
        there.broken.clear()
        here.pool[:] = before
        # It may have been over between the look and the abort.
        if isinstance(end, Exception):
            with pytest.raises(ChannelLost, match="aborted"):
                raise end
            aborted += 1
        if aborted == 3:
            break
    else:
        pytest.fail(TOO_SOON)


async def test_an_aborted_ticket_ships_no_more(scheme, harbor, quay):
    here, there = quay(scheme, 4, BLOCK), harbor(scheme, 4, BLOCK)
    ticket = there.open([1])
    late = asyncio.create_task(here.ship(there.address, ticket, [(0, 1)]))
    await here.sender.abort(ticket)
    with pytest.raises(ChannelLost, match="aborted"):
        await late
    assert there.poisoned
    await here.ship(there.address, there.open([2]), [(0, 2)])


async def test_an_abort_leaves_other_tickets_alone(scheme, harbor, quay):
    here, there = quay(scheme, MANY, LARGE), harbor(scheme, MANY, LARGE)
    doomed, kept = there.open(range(32)), there.open(range(32, MANY))
    lost = asyncio.create_task(here.ship(there.address, doomed, [(i, i) for i in range(32)]))
    right = [
        asyncio.create_task(here.ship(there.address, kept, [(j, j) for j in range(i, i + 8)]))
        for i in range(32, MANY, 8)
    ]
    await until(lambda: there.pool[0, -1] != POISON or lost.done())
    await here.sender.abort(doomed)
    await asyncio.gather(*right)
    await asyncio.gather(lost, return_exceptions=True)
    assert (there.pool[32:] == here.pool[32:]).all()


async def test_a_cancelled_ship_reads_no_more(scheme, harbor, quay):
    here, there = quay(scheme, MANY, LARGE, ONE_STREAM), harbor(scheme, MANY, LARGE)
    before = here.pool.copy()
    ticket, task = await meet_midway(there, here)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    here.pool[:] = 1
    await until(lambda: there.broken or there.landed)
    await there.receiver.close_window(ticket)
    written = there.pool != POISON
    assert (there.pool[written] == before[written]).all()
    assert written.all() or not there.landed


async def test_nobody_there(scheme, quay):
    here = quay(scheme, 1, BLOCK)
    with socket.socket() as taken:  # bound and not listening: the port is ours, and refuses
        taken.bind(("127.0.0.1", 0))
        address = NOBODY.get(scheme, f"{scheme}://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ChannelLost):
            await here.ship(address, secrets.token_bytes(16), [(0, 0)])


async def test_a_receiver_closed_in_mid_ship(scheme, harbor, quay):
    here = quay(scheme, MANY, LARGE)
    for _ in range(TRIES):
        there = harbor(scheme, MANY, LARGE)
        _, task = await meet_midway(there, here)
        await asyncio.wait_for(there.receiver.close(), allowed(5.0))
        there.poison()
        (end,) = await asyncio.gather(task, return_exceptions=True)
        assert there.poisoned
        # It may have been over between the look and the close.
        if isinstance(end, Exception):
            assert isinstance(end, ChannelLost | TicketRejected)
            break
    else:
        pytest.fail(TOO_SOON)
    with pytest.raises(ChannelLost):
        there.open([1])
    with pytest.raises(ChannelLost):
        await here.ship(there.address, secrets.token_bytes(16), [(0, 0)])
    await there.receiver.close()


async def test_a_sender_closed_in_mid_ship(scheme, harbor, quay):
    there = harbor(scheme, MANY, LARGE)
    for _ in range(TRIES):
        here = quay(scheme, MANY, LARGE, ONE_STREAM)
        ticket, task = await meet_midway(there, here)
        await asyncio.wait_for(here.sender.close(), allowed(5.0))
        (end,) = await asyncio.gather(task, return_exceptions=True)
        await until(lambda: there.broken or there.landed)
        # It may have been over between the look and the close.
        if isinstance(end, Exception):
            with pytest.raises(ChannelLost, match="closed"):
                raise end
            break
        await there.receiver.close_window(ticket)
    else:
        pytest.fail(TOO_SOON)
    with pytest.raises(ChannelLost, match="closed"):
        await here.ship(there.address, ticket, [(0, 0)])
    await here.sender.close()


async def test_closed_ends_let_go_of_the_memory(scheme):
    (here, descriptor), there = allocate(BLOCK), bytearray(BLOCK)
    receiver = make_receiver(BIND[scheme], as_pool(scheme, memoryview(there)))
    sender = make_sender(scheme, as_pool(scheme, memoryview(here)), descriptor=descriptor)
    os.close(descriptor)
    ticket = secrets.token_bytes(16)
    receiver.open(Window(ticket, (0,), (1,), BLOCK), lambda _: None, lambda *_: None)
    await sender.ship(receiver.address, ticket, [Span(0, 0, BLOCK)], [(0, 1)])
    await sender.close()
    await receiver.close()
    mapping, here = weakref.ref(here.obj), None
    assert mapping() is None, "somebody still views it"
    there.append(1)  # nor can a bytearray be resized then
