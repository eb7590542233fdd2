"""What only the TCP transport promises against a second process that is stopped."""

import asyncio
import secrets
import signal

from far_process import LARGE, MANY, Start

from kv_transfer.transport import TransportConfig


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
