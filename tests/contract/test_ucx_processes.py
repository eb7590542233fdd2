"""What UCX in particular could do wrong when a second process is killed in the middle."""

import asyncio
import secrets
import signal
import time

import pytest
from far_process import LARGE, MANY, Start
from pace import allowed
from sites import Way, ways

from protocol.errors import ChannelLost


@pytest.mark.parametrize("way", ways(Way("ucx"), Way("ucx", "tcp")), indirect=True)
async def test_a_killed_receiver_costs_the_sender_its_ship_and_nothing_else(
    way: Way, start: Start, quay, harbor
) -> None:
    """With UCX's emulated gets, which this transport does without, such a death could end the sender's process."""
    here, other = quay("ucx", MANY, LARGE), harbor("ucx", MANY, LARGE)
    for delay in (0.0, 0.002, 0.004, 0.008):
        ticket = secrets.token_bytes(16)
        far = await start("receive", scheme="ucx", ticket=ticket.hex())
        address = str((await far.hear())["address"])
        await here.ship(address, ticket, [(0, 0)])
        ship = asyncio.create_task(here.ship(address, ticket, [(i, i) for i in range(1, MANY)]))
        await asyncio.wait([ship], timeout=delay)
        began = time.monotonic()
        far.signal(signal.SIGKILL)
        await asyncio.gather(ship, return_exceptions=True)
        assert ship.exception() is None or isinstance(ship.exception(), ChannelLost)
        assert time.monotonic() - began < allowed(2.0)
    await here.ship(other.address, other.open(range(MANY)), [(i, i) for i in range(MANY)])
    assert (other.pool == here.pool).all()
