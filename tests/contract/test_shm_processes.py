"""The shared-memory transport against a second process that is killed or stopped in the middle."""

import asyncio
import fcntl
import re
import secrets
import signal
import time

import numpy as np
import pytest
from far_process import LARGE, MANY, FarEnd, Start, impatient
from ferry import GENERATION, POISON, Harbor, Quay, until
from pace import allowed
from ucx_segments import shared_files

from kv_transfer.shm.ledger import SLOTS, SenderLedger, _lock
from kv_transfer.span import Span
from kv_transfer.transport import TransportConfig
from protocol.errors import ChannelLost

TRIES = 40
HUGE = 256
"""Blocks of LARGE bytes: a copy long enough to be met in the middle from another process."""


async def one_big_ship(here: Quay, address: str, ticket: bytes, blocks: int) -> None:
    """Ship blocks ``0 ... blocks - 1`` as one span."""
    await here.sender.ship(address, ticket, [Span(0, 0, blocks * LARGE)], [(i, GENERATION) for i in range(blocks)])


async def sent(far: FarEnd, there: Harbor, blocks: list[int]) -> bytes:
    """Have the other process ship these blocks; returns when the first byte is here."""
    ticket = there.open(blocks)
    far.tell(address=there.address, ticket=ticket.hex(), blocks=blocks, generation=GENERATION)
    await until(lambda: there.pool[blocks[0], -1] != POISON)
    return ticket


async def test_a_stopped_sender_holds_up_nothing(start: Start, harbor) -> None:
    there = harbor("shm", MANY, LARGE)
    far = await start("send", scheme="shm", value=1, timeout=10)
    await far.hear()
    for _ in range(3):
        there.poison()
        there.landed.clear()
        ticket = await sent(far, there, list(range(MANY)))
        await far.stop()
        # Its memory is all that is needed of it: stopped, it is copied from to the end.
        await until(lambda: there.landed)
        assert (there.pool == 1).all()
        began = time.monotonic()
        await there.receiver.close_window(ticket)
        assert time.monotonic() - began < allowed(1.0)
        there.poison()
        far.signal(signal.SIGCONT)
        assert (await far.hear())["result"] == "shipped"
        assert there.poisoned


async def test_after_close_not_a_byte_changes_whatever_the_sender_does(start: Start, harbor) -> None:
    there = harbor("shm", MANY, LARGE)
    far = await start("send", scheme="shm", value=1, timeout=10)
    await far.hear()
    for _ in range(TRIES):
        there.poison()
        there.landed.clear()
        ticket = await sent(far, there, list(range(MANY)))
        await there.receiver.close_window(ticket)
        midway = (there.pool[:, -1] == POISON).any()
        there.poison()
        result = (await far.hear())["result"]
        assert there.poisoned
        if midway:
            assert result == "ticket_rejected"
            break
    else:
        pytest.fail("the ship was over too soon every time")
    # The same process, ticket and blocks renewed, gets through.
    fresh = await sent(far, there, [3, 4])
    assert (await far.hear())["result"] == "shipped"
    assert (there.pool[3:5] == 1).all()
    await there.receiver.close_window(fresh)


async def test_a_killed_sender_leaves_whole_ships_or_none_and_no_name(start: Start, harbor, quay) -> None:
    there, here = harbor("shm", MANY + 1, LARGE), quay("shm", MANY + 1, LARGE)
    far = await start("send", scheme="shm", value=1, timeout=10)
    await far.hear()
    names = shared_files()
    other = there.open([MANY])
    ticket = await sent(far, there, list(range(MANY)))
    far.signal(signal.SIGKILL)
    await until(lambda: there.landed)
    assert (there.pool[:MANY] == 1).all()
    await there.receiver.close_window(ticket)
    assert not there.broken
    assert shared_files() <= names
    there.poison()
    fresh = there.open(range(MANY))
    await here.ship(there.address, fresh, [(i, i) for i in range(MANY)])
    await here.ship(there.address, other, [(MANY, MANY)])
    assert (there.pool == here.pool).all()


@pytest.mark.parametrize("known", [True, False])
async def test_a_killed_receiver_is_noticed_at_once(start: Start, quay, known: bool) -> None:
    here = quay("shm", MANY, LARGE)
    ticket = secrets.token_bytes(16)
    far = await start("receive", scheme="shm", ticket=ticket.hex())
    address = str((await far.hear())["address"])
    if known:
        await here.ship(address, ticket, [(0, 0)])
    await far.stop()
    ships = [asyncio.create_task(here.ship(address, ticket, [(i, i)])) for i in range(1, 4)]
    await asyncio.wait(ships, timeout=0.2)
    assert not any(ship.done() for ship in ships)
    began = time.monotonic()
    far.signal(signal.SIGKILL)
    ends = await asyncio.gather(*ships, return_exceptions=True)
    assert all(isinstance(end, ChannelLost) for end in ends)
    assert time.monotonic() - began < allowed(2.0)
    await far.process.wait()
    with pytest.raises(ChannelLost, match="cannot connect"):
        await here.ship(address, ticket, [(5, 5)])


@pytest.mark.parametrize("known", [True, False])
async def test_a_stopped_receiver_is_given_up_after_the_timeout(start: Start, quay, known: bool) -> None:
    config, given_up = impatient(0.5)
    here = quay("shm", MANY, LARGE, config)
    ticket = secrets.token_bytes(16)
    far = await start("receive", scheme="shm", ticket=ticket.hex())
    address = str((await far.hear())["address"])
    if known:
        await here.ship(address, ticket, [(0, 0)])
    await far.stop()
    began = time.monotonic()
    ends = await asyncio.gather(*[here.ship(address, ticket, [(i, i)]) for i in range(1, 20)], return_exceptions=True)
    assert {type(end) for end in ends} == {ChannelLost}
    assert all(re.search(given_up, str(end)) for end in ends)
    assert time.monotonic() - began > 0.8 * config.timeout
    # The next one, on a new connection, fares no better and waits no longer.
    with pytest.raises(ChannelLost, match=given_up):
        await here.ship(address, ticket, [(1, 1)])
    assert time.monotonic() - began < 2 * config.timeout + allowed(4.0)


async def test_a_stopped_receiver_is_given_up_however_busy_another_one_is(start: Start, harbor, quay) -> None:
    config, given_up = impatient(0.5)
    here, there = quay("shm", MANY, LARGE, config), harbor("shm", MANY, LARGE)
    ticket = secrets.token_bytes(16)
    far = await start("receive", scheme="shm", ticket=ticket.hex())
    address = str((await far.hear())["address"])
    await here.ship(address, ticket, [(0, 0)])
    await far.stop()
    stuck = asyncio.create_task(here.ship(address, ticket, [(1, 1)]))
    began = time.monotonic()
    while not stuck.done():
        fresh = there.open(range(MANY))
        await one_big_ship(here, there.address, fresh, MANY)
        await there.receiver.close_window(fresh)
        assert time.monotonic() - began < config.timeout + allowed(9.5)
    with pytest.raises(ChannelLost, match=given_up):
        await stuck


async def test_an_abort_does_not_wait_for_a_receiver_that_was_stopped_between_ships(start: Start, quay) -> None:
    here = quay("shm", MANY, LARGE)
    ticket = secrets.token_bytes(16)
    far = await start("receive", scheme="shm", ticket=ticket.hex())
    address = str((await far.hear())["address"])
    await here.ship(address, ticket, [(0, 0)])
    await far.stop()
    stuck = [asyncio.create_task(here.ship(address, ticket, [(i, i)])) for i in range(1, 6)]
    await asyncio.wait(stuck, timeout=0.1)
    began = time.monotonic()
    await here.sender.abort(ticket)
    for ship in stuck:
        with pytest.raises(ChannelLost, match="aborted"):
            await ship
    assert time.monotonic() - began < allowed(0.5)
    # What it finds when it goes on is refused: it may have had it all before it reads the ledger.
    far.signal(signal.SIGCONT)
    other = secrets.token_bytes(16)
    with pytest.raises(Exception, match="unknown or closed ticket"):
        await here.ship(address, other, [(7, 7)])


async def stopped_in_a_copy(start: Start, here: Quay) -> tuple[FarEnd, bytes, asyncio.Task[None]]:
    """A receiver that is stopped with a batch begun and not ended, as far as the ledger knows."""
    ledger = here.sender._ledger
    for _ in range(TRIES):
        ticket = secrets.token_bytes(16)
        far = await start("receive", scheme="shm", ticket=ticket.hex(), blocks=HUGE)
        address = str((await far.hear())["address"])
        task = asyncio.create_task(one_big_ship(here, address, ticket, HUGE))
        # The first ship of all: it has the last slot.
        await until(lambda task=task: task.done() or ledger.copied(SLOTS - 1) > 0)
        await far.stop()
        if not task.done() and not _free(ledger, SLOTS - 1):
            return far, ticket, task
        await far.end()
        await asyncio.gather(task, return_exceptions=True)
    pytest.fail("never met in the middle of a batch")


def _free(ledger: SenderLedger, slot: int) -> bool:
    """Whether the receiver holds no lock on the entry, asked without striking it."""
    if not _lock(ledger.descriptor, fcntl.F_WRLCK, slot):
        return False
    _lock(ledger.descriptor, fcntl.F_UNLCK, slot)
    return True


@pytest.mark.parametrize("end", ["resumed", "killed"])
async def test_an_abort_returns_only_when_the_copy_is_proved_quiet(start: Start, quay, end: str) -> None:
    here = quay("shm", HUGE, LARGE, TransportConfig(timeout=0.3))
    far, ticket, ship = await stopped_in_a_copy(start, here)
    abort = asyncio.create_task(here.sender.abort(ticket))
    # Longer than any time limit: time proves nothing.
    done, _ = await asyncio.wait([abort, ship], timeout=1.0)
    assert not done
    ship.cancel()
    done, _ = await asyncio.wait([abort, ship], timeout=0.2)
    assert not done
    far.signal(signal.SIGCONT if end == "resumed" else signal.SIGKILL)
    await asyncio.wait_for(abort, allowed(5.0))
    with pytest.raises((ChannelLost, asyncio.CancelledError)):
        await ship
    here.pool[:] = POISON
    if end == "resumed":
        # It has noticed, and nothing landed.
        assert await far.hear() == {"broken": True}


async def test_close_gives_up_after_the_timeout_on_a_receiver_stopped_in_a_copy(start: Start, quay) -> None:
    config, _ = impatient(0.5)
    here = quay("shm", HUGE, LARGE, config)
    far, _, ship = await stopped_in_a_copy(start, here)
    began = time.monotonic()
    await here.sender.close()
    assert time.monotonic() - began < config.timeout + allowed(2.5)
    with pytest.raises(ChannelLost):
        await ship
    here.pool[:] = POISON
    far.signal(signal.SIGCONT)
    # What it read may be anything by now, and does not land.
    assert await far.hear() == {"broken": True}
    assert np.all(here.pool == POISON)
