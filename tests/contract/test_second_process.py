"""The tcp and ucx transports against a second process that is killed or stopped in the middle, here and elsewhere."""

import asyncio
import re
import secrets
import signal
import time

import psutil
import pytest
from far_process import LARGE, MANY, FarEnd, Start, caught_midway, impatient
from ferry import GENERATION, POISON, until
from pace import allowed
from sites import Way, ways

from kv_transfer.tcp.address import parse
from kv_transfer.transport import TransportConfig
from protocol.errors import ChannelLost

PROMPT_CLOSE = 0.1

pytestmark = pytest.mark.parametrize(
    "way",
    ways(Way("tcp"), Way("tcp", apart=True), Way("ucx"), Way("ucx", "tcp"), Way("ucx", "tcp", apart=True)),
    indirect=True,
)


async def receiving(start: Start, way: Way) -> tuple[FarEnd, str, bytes]:
    """Another process with an open window on its whole pool: it, its address, and the ticket."""
    ticket = secrets.token_bytes(16)
    far = await start("receive", scheme=way.scheme, ticket=ticket.hex())
    return far, str((await far.hear())["address"]), ticket


async def test_a_stopped_and_resumed_sender_changes_not_a_byte_after_close(way: Way, start: Start, harbor) -> None:
    there = harbor(way.scheme, MANY, LARGE, near=True)
    far = await start("send", scheme=way.scheme, value=1, timeout=10)
    await far.hear()
    took = []
    for _ in range(3):
        ticket = await caught_midway(far, there)
        began = time.monotonic()
        await there.receiver.close_window(ticket)
        took.append(time.monotonic() - began)
        there.poison()
        fresh = there.open(range(MANY // 2))
        far.signal(signal.SIGCONT)
        assert (await far.hear())["result"] == "ticket_rejected"
        assert there.poisoned
        # The same process, ticket and blocks renewed, gets through.
        far.tell(address=there.address, ticket=fresh.hex(), blocks=[3, 4], generation=GENERATION)
        assert (await far.hear())["result"] == "shipped"
        assert (there.pool[3:5] == 1).all()
        assert (there.pool[5:] == POISON).all()
        await there.receiver.close_window(fresh)
    # The best of them: a busy machine may hold up any one.
    assert min(took) < allowed(PROMPT_CLOSE)
    assert max(took) < allowed(2.0)


async def test_a_killed_sender_breaks_its_window_and_no_other(way: Way, start: Start, harbor, quay) -> None:
    there, here = harbor(way.scheme, MANY + 1, LARGE, near=True), quay(way.scheme, MANY + 1, LARGE)
    far = await start("send", scheme=way.scheme, value=1, timeout=10)
    await far.hear()
    other = there.open([MANY])
    ticket = await caught_midway(far, there)
    far.signal(signal.SIGKILL)
    await until(lambda: there.broken)
    assert {lost for lost, _ in there.broken} == {ticket}
    assert all(isinstance(error, ChannelLost) for _, error in there.broken)
    await there.receiver.close_window(ticket)
    there.poison()
    fresh = there.open(range(MANY))
    await here.ship(there.address, fresh, [(i, i) for i in range(MANY)])
    await here.ship(there.address, other, [(MANY, MANY)])
    assert (there.pool == here.pool).all()


@pytest.mark.parametrize("known", [True, False], ids=["known", "new"])
async def test_a_killed_receiver_is_noticed_at_once(way: Way, start: Start, quay, known: bool) -> None:
    here = quay(way.scheme, MANY, LARGE)
    far, address, ticket = await receiving(start, way)
    if known:
        await here.ship(address, ticket, [(0, 0)])
    await far.stop()
    ships = [asyncio.create_task(here.ship(address, ticket, [(i, i) for i in range(1, MANY)])) for _ in range(3)]
    # Stopped, it takes what its kernel has room for and no more: the ship stays in the middle until the kill.
    await asyncio.wait(ships, timeout=0.2)
    assert not any(ship.done() for ship in ships)
    began = time.monotonic()
    far.signal(signal.SIGKILL)
    ends = await asyncio.gather(*ships, return_exceptions=True)
    assert all(isinstance(end, ChannelLost) for end in ends)
    assert time.monotonic() - began < allowed(2.0)


async def test_a_receiver_that_dies_between_two_ships_leaves_nothing_at_its_sender(
    way: Way, start: Start, quay
) -> None:
    here = quay(way.scheme, MANY, LARGE)
    process = psutil.Process()
    before = process.num_fds()
    far, address, ticket = await receiving(start, way)
    for first in range(0, MANY, MANY // 2):
        # At the same time, for they then have a connection each.
        await asyncio.gather(*[here.ship(address, ticket, [(i, i)]) for i in range(first, first + MANY // 2)])
    far.signal(signal.SIGKILL)
    # What speaks to the process itself ends with it, too.
    await until(lambda: process.num_fds() <= before)


async def test_a_stopped_receiver_is_given_up_after_the_timeout(way: Way, start: Start, quay) -> None:
    config, given_up = impatient(0.5)
    here = quay(way.scheme, MANY, LARGE, config)
    far, address, ticket = await receiving(start, way)
    await here.ship(address, ticket, [(0, 0)])
    await far.stop()
    began = time.monotonic()
    with pytest.raises(ChannelLost, match=given_up):
        await here.ship(address, ticket, [(i, i) for i in range(1, MANY)])
    assert time.monotonic() - began > 0.8 * config.timeout
    # The next one, on a new connection, fares no better and waits no longer.
    with pytest.raises(ChannelLost, match=given_up):
        await here.ship(address, ticket, [(1, 1)])
    assert time.monotonic() - began < 2 * config.timeout + allowed(4.0)


async def test_parts_that_wait_for_a_stopped_receiver_do_not_wait_in_turn(way: Way, start: Start, quay) -> None:
    config, given_up = impatient(0.5)
    here = quay(way.scheme, MANY, LARGE, config)
    far, address, ticket = await receiving(start, way)
    await here.ship(address, ticket, [(0, 0)])
    assert (await far.hear()) == {"landed": True}
    await far.stop()
    began = time.monotonic()
    ships = [here.ship(address, ticket, [(i, i)]) for i in range(1, 20)]
    ends = await asyncio.gather(*ships, return_exceptions=True)
    assert all(isinstance(end, ChannelLost) and re.search(given_up, end.message) for end in ends)
    assert 0.8 * config.timeout < time.monotonic() - began < config.timeout + allowed(2.5)
    if way.scheme == "ucx":
        here.pool[:] = 0
        far.signal(signal.SIGCONT)
        # Announced and never sent: it has nothing to take for whole.
        assert (await far.hear()) == {"broken": True}


async def test_an_abort_and_a_close_do_not_wait_for_a_stopped_receiver(way: Way, start: Start, quay) -> None:
    here = quay(way.scheme, MANY, LARGE, TransportConfig(streams=1))
    far, address, ticket = await receiving(start, way)
    await here.ship(address, ticket, [(0, 0)])
    await far.stop()
    stuck = [asyncio.create_task(here.ship(address, ticket, [(i, i)])) for i in range(1, 6)]
    await asyncio.wait(stuck, timeout=0.1)
    began = time.monotonic()
    await here.sender.abort(ticket)
    for ship in stuck:
        with pytest.raises(ChannelLost, match="aborted"):
            await ship
    assert time.monotonic() - began < allowed(1.0)

    def connected() -> bool:
        where = parse(address.replace(f"{way.scheme}://", "tcp://"))
        return any(connection.raddr == where for connection in psutil.Process().net_connections("tcp"))

    # The connection that was in the middle of a frame goes too: the receiver must not wait for the rest.
    await until(lambda: not connected())
    assert time.monotonic() - began < allowed(2.0)
    await here.sender.close()
    assert time.monotonic() - began < allowed(3.0)
