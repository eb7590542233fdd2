"""A link of 1 Gbit/s: as fast as a plain socket on it, and a small ship is not held up by a large one."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from ferry import Harbor, Quay, until
from namespaces import Host, Lan
from sites import Way, ways

from kv_transfer.transport import TransportConfig

pytestmark = pytest.mark.parametrize("way", ways(Way("tcp", apart=True), Way("ucx", "tcp", apart=True)), indirect=True)

BLOCK = 256 << 10
MANY = 128
RATE = "1gbit"
RATE_BYTES = 1e9 / 8
ROUNDS = 3
TRIES = 5
SHARE = 0.6
"""Of the plain socket's speed, at least: far less than what is reached, so that a busy machine does not matter."""


@pytest.fixture
def lan(way: Way) -> Iterator[Lan]:
    lan = Lan.joined()
    assert lan is not None
    with lan.hosts["near"].slowed(RATE):
        yield lan


def plain_seconds(far: Host, data: memoryview) -> float:
    """How long a plain socket takes for ``data``, its acknowledgement by the other end included."""
    with far.inside():
        listener = socket.create_server((far.address, 0))

    def drain() -> None:
        connection, _ = listener.accept()
        with connection:
            room, left = bytearray(1 << 20), data.nbytes
            while left:
                left -= connection.recv_into(room)
            connection.sendall(b"!")

    with listener:
        thread = threading.Thread(target=drain)
        thread.start()
        with socket.create_connection(listener.getsockname()) as connection:
            began = time.monotonic()
            connection.sendall(data)
            connection.recv(1)
            took = time.monotonic() - began
        thread.join()
    return took


async def shipped_seconds(here: Quay, there: Harbor) -> float:
    ticket = there.open(range(MANY))
    report = await here.ship(there.address, ticket, [(i, i) for i in range(MANY)])
    assert (there.pool == here.pool).all()
    await there.receiver.close_window(ticket)
    there.poison()
    return report.seconds


async def test_a_ship_is_as_fast_as_the_link(way: Way, lan: Lan, harbor, quay) -> None:
    far = lan.hosts["far"]
    here, there = quay(way.scheme, MANY, BLOCK, TransportConfig()), harbor(way.scheme, MANY, BLOCK, TransportConfig())
    data = memoryview(here.pool).cast("B")
    before = far.received()
    ours, plain = [], []
    for _ in range(ROUNDS):
        ours.append(await shipped_seconds(here, there))
        plain.append(await asyncio.to_thread(plain_seconds, far, data))
    # They went over the link, all of them.
    assert far.received() - before >= 2 * ROUNDS * data.nbytes
    assert min(plain) > 0.8 * data.nbytes / RATE_BYTES, "the link is not slowed"
    assert min(plain) / min(ours) > SHARE


async def test_a_small_ship_is_not_held_up_by_a_large_one(way: Way, lan: Lan, harbor, quay) -> None:
    here, there = quay(way.scheme, MANY, BLOCK, TransportConfig()), harbor(way.scheme, MANY, BLOCK, TransportConfig())
    for _ in range(TRIES):
        ticket, other = there.open(range(MANY - 8)), there.open(range(MANY - 8, MANY))
        await here.ship(there.address, other, [(MANY - 1, MANY - 1)])
        large = asyncio.create_task(here.ship(there.address, ticket, [(i, i) for i in range(MANY - 8)]))
        await until(lambda: (there.pool[0] == here.pool[0]).all())
        for small in range(MANY - 8, MANY - 5):
            await here.ship(there.address, other, [(small, small)])
            assert (there.pool[small] == here.pool[small]).all()
        overtaken = not large.done()
        await large
        assert (there.pool[: MANY - 5] == here.pool[: MANY - 5]).all()
        if overtaken:
            return
        # Nobody had a core for the small ones meanwhile.
        for open_still in (ticket, other):
            await there.receiver.close_window(open_still)
        there.poison()
    pytest.fail("the small ones come after the large one every time")
