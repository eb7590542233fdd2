"""Both ends of a benchmark in one process, on real sockets: limits, checks, turns, and ends that are not cut short."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator

import pytest

from cluster.bench import limit, message, near_end, plain_socket
from cluster.bench.block_table import Transfer
from cluster.bench.case import Case, Grid
from cluster.bench.ending import to_the_end
from cluster.bench.far_end import serve
from cluster.bench.near_end import Session, Setup, opened
from cluster.bench.report import Outcome
from cluster.bench.run import Effort, run
from cluster.bench.statistics import rate
from kv_transfer.span import Span
from kv_transfer.transport import TransportConfig
from protocol.errors import ConnectionFailed, IntegrityMismatch, KVFerryError, VersionMismatch
from protocol.layout import KVLayout

LAYOUT = KVLayout(num_layers=2, kv_heads=2, head_dim=64, block_size=16)
SETUP = Setup(LAYOUT, 256, TransportConfig(), seed=1)
EFFORT = Effort(seconds=0.01, time_limit=30.0)
Place = tuple[str, int]


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    bound: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve("127.0.0.1", 0, max_pool=64 << 20, on_bound=lambda host, port: bound.set_result((host, port)), tied=False)
    )
    yield await bound
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving


def cases(*tokens: int) -> list[Case]:
    return Grid(
        transports=("tcp",), tokens=tokens, tables=("contiguous", "scattered"), ways=("whole",), concurrency=(1, 2)
    ).cases()


async def outcomes_of(wanted: list[Case], place: Place, effort: Effort = EFFORT) -> list[Outcome]:
    found: list[Outcome] = []
    await run(wanted, place, SETUP, effort, lambda *_: None, found.append)
    assert [outcome.case for outcome in found] == wanted
    return found


@pytest.mark.parametrize("name", ["memcpy", "socket"])
async def test_each_limit_moves_the_same_bytes(name: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_round, taken = limit.limit_round, []

    async def recorded(which: limit.Limit, session: Session, transfers: list[Transfer]) -> float:
        taken.append(await limit_round(which, session, transfers))
        return taken[-1]

    monkeypatch.setattr(limit, "limit_of", lambda *_, **__: name)
    monkeypatch.setattr(limit, "limit_round", recorded)
    for outcome in await outcomes_of(cases(16, 512), place):
        found = outcome.measured
        assert found is not None, outcome.reason
        assert found.limit == name
        _, *counted = [taken.pop(0) for _ in range(found.rounds + 1)]
        assert found.limit_gb_per_s == rate(found.nbytes * outcome.case.concurrency, counted)
    assert taken == []


async def test_a_case_that_fails_spoils_no_other(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = cases(16)
    ship_round = Session.ship_round
    broken = iter([False, False, True])

    async def once_broken(self: Session, transfers: list[Transfer], *, checked: bool = False) -> near_end.Round:
        if next(broken, False):
            await asyncio.Event().wait()
        return await ship_round(self, transfers, checked=checked)

    monkeypatch.setattr(Session, "ship_round", once_broken)
    found = await outcomes_of(wanted, place, Effort(seconds=0.01, time_limit=1.0))
    assert [outcome.state for outcome in found] == ["failed", "measured", "measured", "measured"]
    assert found[0].reason == "not done within 1 seconds"


async def test_other_bytes_than_were_sent_are_noticed(place: Place) -> None:
    size = LAYOUT.block_bytes
    async with opened(*place, "tcp", SETUP) as session:
        honest = Transfer((3,), (5,), (((Span(3 * size, 5 * size, size),), (5,)),))
        await session.ship_round([honest], checked=True)
        with pytest.raises(IntegrityMismatch, match="other bytes"):
            await session.ship_round([Transfer((4,), honest.target, honest.ships)], checked=True)


async def test_a_ship_that_fails_is_told_as_it_is(place: Place) -> None:
    size = LAYOUT.block_bytes
    async with opened(*place, "tcp", SETUP) as session:
        outside = Transfer((0,), (5,), (((Span(0, 6 * size, size),), (6,)),))
        with pytest.raises(KVFerryError, match="6"):
            await session.ship_round([outside, Transfer((), (), ())])


async def test_peers_take_turns(place: Place) -> None:
    async with opened(*place, "tcp", SETUP):
        second = asyncio.create_task(outcomes_of(cases(16)[:1], place))
        done, _ = await asyncio.wait([second], timeout=0.1)
        assert not done
    assert (await second)[0].measured is not None


async def test_another_version_is_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_end, "VERSION", message.VERSION + 1)
    with pytest.raises(VersionMismatch, match=f"version {message.VERSION} .* the other {message.VERSION + 1}"):
        await outcomes_of(cases(16), place)


async def test_a_pool_larger_than_the_far_end_allows_is_refused(place: Place) -> None:
    large = Setup(LAYOUT, (64 << 20) // LAYOUT.block_bytes + 1, TransportConfig(), seed=1)
    with pytest.raises(KVFerryError, match="listening side allows"):
        async with opened(*place, "tcp", large):
            pass


async def test_nobody_there() -> None:
    with pytest.raises(ConnectionFailed, match=r"nobody answers at 127\.0\.0\.1:9"):
        await outcomes_of(cases(16), ("127.0.0.1", 9))


async def test_a_plain_round_that_is_cancelled_ends_its_thread_and_complains_to_nobody() -> None:
    loop, complaints = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    here, there = socket.socketpair()
    with here, there:
        round_trip = asyncio.create_task(plain_socket.ship(here, [memoryview(bytearray(64 << 20))]))
        await asyncio.to_thread(there.recv, 1)
        round_trip.cancel()
        await asyncio.wait([round_trip])
        assert round_trip.cancelled()
    # Whatever still holds the thread's outcome lets go of it; an outcome nobody asked for complains then.
    del round_trip
    await asyncio.sleep(0)
    gc.collect()
    assert complaints == []


async def test_an_end_is_not_cut_short_by_cancels() -> None:
    go, ended = asyncio.Event(), False

    async def end() -> None:
        nonlocal ended
        await go.wait()
        ended = True

    ending = asyncio.create_task(to_the_end(end()))
    for _ in range(3):
        await asyncio.sleep(0)
        ending.cancel()
    await asyncio.sleep(0)
    assert not ending.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert ended


async def test_an_end_that_fails_raises() -> None:
    async def end() -> None:
        raise ConnectionFailed("gone")

    with pytest.raises(ConnectionFailed, match="gone"):
        await to_the_end(end())
