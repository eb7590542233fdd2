"""The UCX transport against a second process that is killed or stopped in the middle, over shared memory and TCP."""

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from far_process import FarEnd
from ferry import GENERATION, POISON, Harbor, until
from ucx_here import need_ucx

from kv_transfer.transport import TransportConfig
from protocol.errors import ChannelLost

pytestmark = pytest.mark.ucx

LARGE = 1 << 20
MANY = 64
TRIES = 60

Start = Callable[..., Awaitable[FarEnd]]


def ucx_segments() -> set[Path]:
    return {*Path("/dev/shm").glob("ucx_shm_*")}


@pytest.fixture(params=["all", "tcp"])
def means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What UCX may use: all that it has, or TCP alone, as between two machines without RDMA."""
    need_ucx()
    monkeypatch.setenv("UCX_TLS", request.param)
    return str(request.param)


@pytest.fixture
async def begin(means: str) -> AsyncIterator[Start]:
    before = ucx_segments()
    async with AsyncExitStack() as stack:
        # A killed process cannot take back the segments that UCX made for it.
        stack.callback(lambda: [left.unlink(missing_ok=True) for left in ucx_segments() - before])

        async def start(role: str, **words: object) -> FarEnd:
            script = str(Path(__file__).with_name("far_end.py"))
            pipe = asyncio.subprocess.PIPE
            far = FarEnd(
                await asyncio.create_subprocess_exec(
                    sys.executable, script, role, stdin=pipe, stdout=pipe, env={**os.environ, "UCX_TLS": means}
                )
            )
            stack.push_async_callback(far.end)
            far.tell(scheme="ucx", blocks=MANY, block_bytes=LARGE, **words)
            return far

        yield start


async def caught_midway(far: FarEnd, there: Harbor) -> bytes:
    """Have the other process ship its pool, and stop it (SIGSTOP) in the middle of it."""
    for _ in range(TRIES):
        there.poison()
        there.landed.clear()
        ticket = there.open(range(MANY))
        far.tell(address=there.address, ticket=ticket.hex(), blocks=list(range(MANY)), generation=GENERATION)
        await until(lambda: there.pool[0, -1] != POISON)
        await far.stop()
        if not there.landed and (there.pool[:, -1] == POISON).any():
            return ticket
        far.signal(signal.SIGCONT)
        assert (await far.hear())["result"] == "shipped"
        await there.receiver.close_window(ticket)
    pytest.fail("the ship was over too soon every time")


async def test_a_stopped_and_resumed_sender_changes_not_a_byte_after_close(begin: Start, harbor) -> None:
    there = harbor("ucx", MANY, LARGE)
    far = await begin("send", value=1, timeout=10)
    await far.hear()
    for _ in range(3):
        ticket = await caught_midway(far, there)
        began = time.monotonic()
        await there.receiver.close_window(ticket)
        assert time.monotonic() - began < 2.0
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


async def test_a_killed_sender_breaks_its_window_and_no_other(begin: Start, harbor, quay) -> None:
    there, here = harbor("ucx", MANY + 1, LARGE), quay("ucx", MANY + 1, LARGE)
    far = await begin("send", value=1, timeout=10)
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


async def test_a_killed_receiver_costs_the_sender_its_ship_and_nothing_else(begin: Start, quay, harbor) -> None:
    """With UCX's emulated gets, which this transport does without, such a death could end the sender's process."""
    here, other = quay("ucx", MANY, LARGE), harbor("ucx", MANY, LARGE)
    for delay in (0.0, 0.002, 0.004, 0.008):
        ticket = secrets.token_bytes(16)
        far = await begin("receive", ticket=ticket.hex())
        address = str((await far.hear())["address"])
        await here.ship(address, ticket, [(0, 0)])
        ship = asyncio.create_task(here.ship(address, ticket, [(i, i) for i in range(1, MANY)]))
        await asyncio.wait([ship], timeout=delay)
        began = time.monotonic()
        far.signal(signal.SIGKILL)
        await asyncio.gather(ship, return_exceptions=True)
        assert ship.exception() is None or isinstance(ship.exception(), ChannelLost)
        assert time.monotonic() - began < 2.0
    await here.ship(other.address, other.open(range(MANY)), [(i, i) for i in range(MANY)])
    assert (other.pool == here.pool).all()


@pytest.mark.parametrize("known", [True, False])
async def test_a_killed_receiver_is_noticed_at_once(begin: Start, quay, known: bool) -> None:
    here = quay("ucx", MANY, LARGE)
    ticket = secrets.token_bytes(16)
    far = await begin("receive", ticket=ticket.hex())
    address = str((await far.hear())["address"])
    if known:
        await here.ship(address, ticket, [(0, 0)])
    await far.stop()
    ships = [asyncio.create_task(here.ship(address, ticket, [(i, i) for i in range(1, MANY)])) for _ in range(3)]
    await asyncio.wait(ships, timeout=0.2)
    assert not any(ship.done() for ship in ships)
    began = time.monotonic()
    far.signal(signal.SIGKILL)
    ends = await asyncio.gather(*ships, return_exceptions=True)
    assert all(isinstance(end, ChannelLost) for end in ends)
    assert time.monotonic() - began < 2.0


async def test_a_stopped_receiver_is_given_up_after_the_timeout(begin: Start, quay) -> None:
    here = quay("ucx", MANY, LARGE, TransportConfig(timeout=0.5))
    ticket = secrets.token_bytes(16)
    far = await begin("receive", ticket=ticket.hex())
    address = str((await far.hear())["address"])
    await here.ship(address, ticket, [(0, 0)])
    assert (await far.hear()) == {"landed": True}
    await far.stop()
    began = time.monotonic()
    ships = [here.ship(address, ticket, [(i, i)]) for i in range(1, 20)]
    ends = await asyncio.gather(*ships, return_exceptions=True)
    assert all(isinstance(end, ChannelLost) and "no progress for 0.5 seconds" in end.message for end in ends)
    # What waits for a channel does not wait in turn.
    assert 0.4 < time.monotonic() - began < 3.0
    here.pool[:] = 0
    far.signal(signal.SIGCONT)
    # Announced and never sent: it has nothing to take for whole.
    assert (await far.hear()) == {"broken": True}


async def test_an_abort_and_a_close_do_not_wait_for_a_stopped_receiver(begin: Start, quay) -> None:
    here = quay("ucx", MANY, LARGE, TransportConfig(streams=1))
    ticket = secrets.token_bytes(16)
    far = await begin("receive", ticket=ticket.hex())
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
    await here.sender.close()
    assert time.monotonic() - began < 2.0
