"""The link between two hosts is cut in the middle of a ship, for longer and for shorter than the sender's patience."""

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ferry import POISON, Harbor, Quay, until
from namespaces import Host, Lan
from pace import allowed
from sites import Way, ways

from kv_transfer.transport import TransportConfig
from protocol.errors import ChannelLost

pytestmark = pytest.mark.parametrize("way", ways(Way("tcp", apart=True), Way("ucx", "tcp", apart=True)), indirect=True)

BLOCK = 512 << 10
MANY = 64
PATIENCE = TransportConfig(timeout=1.0, buffer_bytes=64 << 10)
CLOSING = {"04", "05", "0B"}
"""The kernel's numbers for a connection that this end has closed, and the other not yet."""
SLOW = "400mbit"
"""The pool takes 0.7 s at this rate: there is a middle to cut it in."""
STALLED = 0.4
TRIES = 10
SOON = 10.0
"""Seconds until a ship is through once the link is back: it takes one, and more where the machine is busy."""


@pytest.fixture
def lan(way: Way) -> Iterator[Lan]:
    lan = Lan.joined()
    assert lan is not None
    with lan.hosts["near"].slowed(SLOW):
        yield lan
    for host in lan.hosts.values():
        host.mend()


async def cut_midway(host: Host, there: Harbor, here: Quay) -> tuple[bytes, asyncio.Task[object]]:
    """A ship of the whole pool that was in the middle when the host's link was cut."""
    for _ in range(TRIES):
        ticket = there.open(range(MANY))
        task = asyncio.create_task(here.ship(there.address, ticket, [(i, i) for i in range(MANY)]))
        await until(lambda: there.pool[0, -1] != POISON)
        host.cut()
        if (there.pool[:, -1] == POISON).any():
            return ticket, task
        # The command that cuts took longer than the ship.
        host.mend()
        await asyncio.gather(task, return_exceptions=True)
        await there.receiver.close_window(ticket)
        there.landed.clear()
        there.broken.clear()
        there.poison()
    pytest.fail("the link was cut too late every time")


async def shipped_again(here: Quay, there: Harbor, blocks: range) -> None:
    """Ship ``blocks`` in a fresh window, and in another if that fails."""
    fresh = there.open(blocks)
    try:
        await here.ship(there.address, fresh, [(i, i) for i in blocks])
    except ChannelLost:
        await there.receiver.close_window(fresh)
        await here.ship(there.address, there.open(blocks), [(i, i) for i in blocks])


def unsent(host: Host) -> bool:
    """Whether the kernel still tries to send to ``host`` what was given to connections that have been closed since."""
    there = socket.inet_aton(host.address)[::-1].hex().upper()
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return any(row[2].startswith(there) and row[3] in CLOSING for row in rows)


@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_a_cut_link_costs_the_ships_on_it_and_no_byte_is_written_after(
    way: Way, lan: Lan, side: str, harbor, quay
) -> None:
    here, there = quay(way.scheme, MANY, BLOCK, PATIENCE), harbor(way.scheme, MANY, BLOCK)
    # What the cut does not touch: this host itself, or a third one.
    with lan.hosts["third"].inside():
        other = Harbor(way.scheme, MANY, BLOCK, host=lan.hosts["third"].address)
    aside = harbor(way.scheme, MANY, BLOCK, near=True)
    try:
        served = other if side == "receiver" else aside
        await here.ship(served.address, served.open([0]), [(0, 0)])
        ticket, ship = await cut_midway(lan.hosts["near" if side == "sender" else "far"], there, here)
        began = time.monotonic()
        await here.ship(served.address, served.open([1, 2]), [(1, 1), (2, 2)])
        assert (served.pool[:3] == here.pool[:3]).all()
        with pytest.raises(ChannelLost):
            await ship
        assert time.monotonic() - began < PATIENCE.timeout + allowed(3.0)
        await asyncio.wait_for(there.receiver.close_window(ticket), allowed(1.0))
        there.poison()
        lan.hosts["near"].mend()
        lan.hosts["far"].mend()
        began = time.monotonic()
        await shipped_again(here, there, range(MANY // 2, MANY))
        assert time.monotonic() - began < SOON
        # The first connection's kernel has its say too, now that it can.
        await until(lambda: not unsent(lan.hosts["far"]))
        assert (there.pool[MANY // 2 :] == here.pool[MANY // 2 :]).all()
        assert (there.pool[: MANY // 2] == POISON).all()
    finally:
        await other.receiver.close()


@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_a_cut_shorter_than_the_patience_costs_time_alone(way: Way, lan: Lan, side: str, harbor, quay) -> None:
    here, there = quay(way.scheme, MANY, BLOCK), harbor(way.scheme, MANY, BLOCK)
    host = lan.hosts["near" if side == "sender" else "far"]
    _, ship = await cut_midway(host, there, here)
    await asyncio.wait({ship}, timeout=STALLED)
    assert not ship.done()
    host.mend()
    await ship
    assert (there.pool == here.pool).all()
    await until(lambda: there.landed)
    assert not there.broken


async def test_a_closed_receiver_behind_a_cut_link_does_not_wait_for_it(way: Way, lan: Lan, harbor, quay) -> None:
    here, there = quay(way.scheme, MANY, BLOCK, PATIENCE), harbor(way.scheme, MANY, BLOCK)
    _, ship = await cut_midway(lan.hosts["far"], there, here)
    await asyncio.wait_for(there.receiver.close(), allowed(2.0))
    there.poison()
    with pytest.raises(ChannelLost):
        await ship
    await asyncio.wait_for(here.sender.close(), allowed(2.0))
    lan.hosts["far"].mend()
    await until(lambda: not unsent(lan.hosts["far"]))
    assert there.poisoned
