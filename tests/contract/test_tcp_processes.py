"""What only the TCP transport promises against a second process that is stopped."""

import asyncio
import secrets
import signal
import time

import pytest
from far_process import LARGE, MANY, Start, impatient
from pace import allowed

from kv_transfer.transport import TransportConfig
from protocol.errors import ChannelLost


async def test_a_stopped_receiver_is_given_up_once_for_both_lanes(start: Start, quay) -> None:
    config, given_up = impatient(1.0)
    here = quay("tcp", MANY, LARGE, config)
    ticket = secrets.token_bytes(16)
    far = await start("receive", ticket=ticket.hex())
    address = str((await far.hear())["address"])
    # Large: the lane of small ships has no connection yet, and can get none from a stopped receiver.
    await here.ship(address, ticket, [(i, i) for i in range(8)])
    await far.stop()
    began = time.monotonic()
    with pytest.raises(ChannelLost, match=given_up):
        await here.ship(address, ticket, [(9, 9)])
    assert time.monotonic() - began < config.timeout + allowed(0.8)


async def test_a_small_ship_does_not_wait_behind_a_large_one(start: Start, quay) -> None:
    here = quay("tcp", MANY, LARGE, TransportConfig(streams=1))
    ticket = secrets.token_bytes(16)
    far = await start("receive", ticket=ticket.hex())
    address = str((await far.hear())["address"])
    await here.ship(address, ticket, [(0, 0), (1, 1)])
    await here.ship(address, ticket, [(2, 2)])
    await far.stop()
    large = asyncio.create_task(here.ship(address, ticket, [(i, i) for i in range(4, MANY)]))
    small = asyncio.create_task(here.ship(address, ticket, [(3, 3)]))
    await asyncio.wait({large, small}, timeout=0.1)
    assert not small.done()
    # The frame of the small one is in the receiver's kernel or on its way there, not behind the large one's.
    far.signal(signal.SIGCONT)
    done, _ = await asyncio.wait({large, small}, return_when=asyncio.FIRST_COMPLETED)
    assert small in done
    await large
