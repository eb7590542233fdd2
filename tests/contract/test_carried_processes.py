"""The carried transports against a second process, or a carrier, that is killed or stopped in the middle."""

import asyncio
import re
import secrets
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from carrier_here import need_library
from far_process import LARGE, MANY, Start, caught_midway, impatient
from ferry import GENERATION, POISON, Harbor, Quay, until
from pace import allowed
from ucx_segments import none_left, segments

from protocol.errors import ChannelLost


@pytest.fixture(params=["ucxx", "nixl"])
def carried(request: pytest.FixtureRequest) -> str:
    need_library(request.param)
    return str(request.param)


@pytest.fixture(params=["all", "tcp"])
def means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What UCX may use: all that it has, or TCP alone, as between two machines without RDMA."""
    monkeypatch.setenv("UCX_TLS", request.param)
    return str(request.param)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    with none_left():
        yield
    assert not carriers()


def carriers(pid: int | None = None) -> list[psutil.Process]:
    """Carriers of a worker, this process by default."""
    return [
        child
        for child in psutil.Process(pid).children()
        if child.status() != psutil.STATUS_ZOMBIE and "kv_transfer.carried.child" in child.cmdline()
    ]


async def crosses(there: Harbor, here: Quay) -> None:
    there.poison()
    ticket = there.open(range(MANY))
    await here.ship(there.address, ticket, [(i, i) for i in range(MANY)])
    assert (there.pool[:MANY] == here.pool[:MANY]).all()
    await there.receiver.close_window(ticket)


async def test_closed_ends_leave_no_carrier_memory_or_descriptor(harbor, quay, carried) -> None:
    async def once() -> int:
        there, here = harbor(carried, MANY, LARGE), quay(carried, MANY, LARGE)
        await crosses(there, here)
        assert len(carriers()) == 2
        await here.sender.close()
        await there.receiver.close()
        assert not carriers()
        assert not [found.name for found in threading.enumerate() if found.name.startswith(f"kv-{carried}")]
        return psutil.Process().num_fds()

    before = segments()
    await once()
    held = await once()
    assert await once() <= held
    assert segments() <= before


async def test_a_stopped_and_resumed_sender_changes_not_a_byte_after_close(
    start: Start, harbor, carried, means
) -> None:
    there = harbor(carried, MANY, LARGE)
    far = await start("send", scheme=carried, value=1, timeout=10)
    await far.hear()
    for _ in range(3):
        ticket = await caught_midway(far, there)
        stopped = carriers(far.process.pid)
        for carrier in stopped:
            carrier.suspend()
        began = time.monotonic()
        await there.receiver.close_window(ticket)
        assert time.monotonic() - began < allowed(2.0)
        there.poison()
        fresh = there.open(range(MANY // 2))
        for carrier in stopped:
            carrier.resume()
        far.signal(signal.SIGCONT)
        result = await far.hear()
        assert result["result"] == "ticket_rejected", result
        assert there.poisoned
        # The same process, ticket and blocks renewed, gets through.
        far.tell(address=there.address, ticket=fresh.hex(), blocks=[3, 4], generation=GENERATION)
        assert (await far.hear())["result"] == "shipped"
        assert (there.pool[3:5] == 1).all()
        assert (there.pool[5:] == POISON).all()
        await there.receiver.close_window(fresh)


async def test_a_killed_sender_breaks_its_window_and_no_other(start: Start, harbor, quay, carried, means) -> None:
    there, here = harbor(carried, MANY + 1, LARGE), quay(carried, MANY + 1, LARGE)
    far = await start("send", scheme=carried, value=1, timeout=10)
    await far.hear()
    other = there.open([MANY])
    ticket = await caught_midway(far, there)
    orphans = carriers(far.process.pid)
    assert orphans
    began = time.monotonic()
    far.signal(signal.SIGKILL)
    await until(lambda: there.broken)
    assert time.monotonic() - began < allowed(1.0)
    assert {lost for lost, _ in there.broken} == {ticket}
    assert all(isinstance(error, ChannelLost) for _, error in there.broken)
    await there.receiver.close_window(ticket)
    await crosses(there, here)
    await here.ship(there.address, other, [(MANY, MANY)])
    assert (there.pool[MANY] == here.pool[MANY]).all()
    await until(lambda: not any(orphan.is_running() for orphan in orphans))


async def test_a_killed_receiver_costs_the_sender_its_ship_and_nothing_else(
    start: Start, quay, harbor, carried, means
) -> None:
    """A reader's death over TCP ends the process that NIXL reads from, which is why that is not this one."""
    here, other = quay(carried, MANY, LARGE), harbor(carried, MANY, LARGE)
    for delay in (0.0, 0.01, 0.02, 0.04):
        ticket = secrets.token_bytes(16)
        far = await start("receive", scheme=carried, ticket=ticket.hex())
        address = str((await far.hear())["address"])
        await here.ship(address, ticket, [(0, 0)])
        ship = asyncio.create_task(here.ship(address, ticket, [(i, i) for i in range(1, MANY)]))
        await asyncio.wait([ship], timeout=delay)
        for carrier in carriers(far.process.pid):
            carrier.kill()
        far.signal(signal.SIGKILL)
        began = time.monotonic()
        await asyncio.gather(ship, return_exceptions=True)
        assert ship.exception() is None or isinstance(ship.exception(), ChannelLost)
        assert time.monotonic() - began < allowed(2.0)
    await crosses(other, here)


async def test_a_stopped_receiver_is_given_up_after_the_timeout(start: Start, quay, carried) -> None:
    config, given_up = impatient(2.0)
    here = quay(carried, MANY, LARGE, config)
    ticket = secrets.token_bytes(16)
    far = await start("receive", scheme=carried, ticket=ticket.hex())
    address = str((await far.hear())["address"])
    await here.ship(address, ticket, [(0, 0)])
    assert (await far.hear()) == {"landed": True}
    await far.stop()
    began = time.monotonic()
    ships = [here.ship(address, ticket, [(i, i)]) for i in range(1, 20)]
    ends = await asyncio.gather(*ships, return_exceptions=True)
    assert all(isinstance(end, ChannelLost) and re.search(given_up, end.message) for end in ends)
    # What waits for the connection does not wait in turn.
    assert 0.95 * config.timeout < time.monotonic() - began < config.timeout + allowed(3.0)
    here.pool[:] = 0
    far.signal(signal.SIGCONT)
    assert (await far.hear()) == {"broken": True}


async def test_an_abort_and_a_close_do_not_wait_for_a_stopped_receiver(start: Start, quay, carried) -> None:
    here = quay(carried, MANY, LARGE)
    ticket = secrets.token_bytes(16)
    far = await start("receive", scheme=carried, ticket=ticket.hex())
    address = str((await far.hear())["address"])
    await here.ship(address, ticket, [(0, 0)])
    await far.stop()
    for carrier in carriers(far.process.pid):
        carrier.suspend()
    stuck = [asyncio.create_task(here.ship(address, ticket, [(i, i)])) for i in range(1, 6)]
    await asyncio.wait(stuck, timeout=0.1)
    began = time.monotonic()
    await here.sender.abort(ticket)
    assert time.monotonic() - began < allowed(0.5)
    for ship in stuck:
        with pytest.raises(ChannelLost, match="aborted"):
            await ship
    await here.sender.close()
    assert time.monotonic() - began < allowed(3.0)
    for carrier in carriers(far.process.pid):
        carrier.resume()


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("whose", [0, 1])
async def test_a_dead_or_stopped_carrier_costs_one_ship(harbor, quay, carried, fate, whose) -> None:
    """Both ends' carriers are children of this process: the older one is the sender's."""
    config, _ = impatient(2.0)
    there, here = harbor(carried, MANY, LARGE, config), quay(carried, MANY, LARGE, config)
    await crosses(there, here)
    victim = sorted(carriers(), key=lambda child: "send" not in child.cmdline())[whose]
    there.poison()
    ticket = there.open(range(MANY))
    ship = asyncio.create_task(here.ship(there.address, ticket, [(i, i) for i in range(MANY)]))
    await until(lambda: there.pool[0, -1] != POISON or ship.done())
    victim.send_signal(fate)
    await asyncio.gather(ship, return_exceptions=True)
    assert ship.exception() is None or isinstance(ship.exception(), ChannelLost)
    await there.receiver.close_window(ticket)
    await crosses(there, here)
