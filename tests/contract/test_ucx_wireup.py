"""A UCX peer that hands over its worker's address and is then not there to connect to.

Over RDMA UCX connects by datagrams, which a worker that is gone does not answer; over TCP it is told at once.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest
from caller import Caller, party
from ferry import GENERATION, until
from pace import allowed
from ucx_here import need_ucx

from kv_transfer import hello
from kv_transfer.transport import TransportConfig
from kv_transfer.ucx import handshake, wire
from kv_transfer.ucx.channel import CLOSED, Channel, Stop
from kv_transfer.ucx.library import Context, library
from kv_transfer.ucx.wire import Verdict
from kv_transfer.windows import Part
from protocol.errors import ChannelLost

pytestmark = pytest.mark.ucx

BLOCK = 64 << 10
SHARED_SINCE = 1, 14
CALM, SHORT = TransportConfig(), TransportConfig(timeout=1.0)


@pytest.fixture(autouse=True)
def ucx() -> None:
    need_ucx()


@pytest.fixture
async def context(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Context]:
    """Of some other memory, for the peer's workers; with our settings, whatever the environment says."""
    monkeypatch.delenv("UCX_KEEPALIVE_INTERVAL", raising=False)
    memory = np.zeros(BLOCK, np.uint8)
    made = Context(memory.ctypes.data, BLOCK, writable=True)
    yield made
    made.free()


class Peer:
    """A receiver that says "go", and does not go; its worker is destroyed before, or is there and receives nothing."""

    def __init__(self, context: Context, *, gone: bool) -> None:
        self._context = context
        self._gone = gone

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Its address."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"ucx://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = handshake.opened(self._context, await handshake.admit(reader, writer, CALM))
        ours = handshake.own_worker(channel, library().version)
        await wire.read_worker(reader)
        if self._gone:
            await channel.close()
        writer.write(wire.pack_worker(ours))
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await wire.read_head(reader)
            await reader.readexactly(head.table_bytes)
            writer.write(wire.pack_answer(head, Verdict.GO))
            await reader.readexactly(1)
        await channel.close()
        writer.close()


@pytest.mark.parametrize(("gone", "config"), [(True, CALM), (False, SHORT)], ids=["gone", "silent"])
async def test_a_sender_gives_up_a_receiver_that_it_cannot_connect_to(
    harbor, quay, context: Context, gone: bool, config: TransportConfig
) -> None:
    there, here = harbor("ucx", 2, BLOCK), quay("ucx", 2, BLOCK, config)
    async with Peer(context, gone=gone).listening() as address:
        began = time.monotonic()
        with pytest.raises(ChannelLost):
            await here.ship(address, bytes(16), [(0, 0)])
        assert time.monotonic() - began < config.timeout + allowed(3.0)
        await here.ship(there.address, there.open([1]), [(0, 1)])
        await here.sender.close()
    assert (there.pool[1] == here.pool[0]).all()


async def test_a_receiver_gives_up_a_sender_that_it_cannot_connect_to(harbor, quay, context: Context) -> None:
    there, here = harbor("ucx", 2, BLOCK), quay("ucx", 2, BLOCK)
    caller = await Caller.dial(there.address)
    met = await caller.hold(hello.greet(party("ucx")))
    channel = handshake.opened(context, met)
    ours = handshake.own_worker(channel, library().version)
    await channel.close()
    part = Part(1, 0, 1, [(0, BLOCK)], [(0, GENERATION)])
    caller.say(wire.pack_worker(ours) + wire.pack_part(there.open([0]), part))
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        await wire.read_worker(caller.reader)
        await wire.read_answer(caller.reader)
    caller.hang_up()
    await until(lambda: there.broken)
    await here.ship(there.address, there.open([1]), [(0, 1)])
    assert (there.pool[1] == here.pool[0]).all()


async def test_an_event_that_nobody_is_told_of_costs_a_moment(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As verbs lose them where one comes between the last look and the arming."""
    memory = np.zeros(2 * BLOCK, np.uint8)
    memory[:BLOCK] = 7
    pool = Context(memory.ctypes.data, memory.nbytes, writable=True)
    with monkeypatch.context() as deaf:
        deaf.setattr(asyncio.get_running_loop(), "add_reader", lambda *_: None)
        near, far = Channel(pool), Channel(pool)
    near.connect(far.address())
    far.connect(near.address())
    received = far.move([(memory.ctypes.data + BLOCK, BLOCK)], Stop(), receives=True)
    sent = near.move([(memory.ctypes.data, BLOCK)], Stop(), receives=False)
    await asyncio.wait({sent, received}, timeout=10.0)
    await asyncio.gather(near.close(), far.close())
    pool.free()
    assert sent.result() == received.result() == 0
    assert (memory == 7).all()


@pytest.mark.parametrize("tls", ["sysv", "posix", "tcp", ""])
async def test_a_channel_closes_in_two_turns_though_its_peer_stands_still(
    tls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over shared memory its queue is full then: what is flushed, even to be cancelled, waits for room there."""
    if tls in ("sysv", "posix") and wire.ucx_release(library().version) < SHARED_SINCE:
        pytest.skip("by shared memory alone UCX 1.13 makes no endpoint that tells of its peer's end")
    for shared in ("SYSV", "POSIX"):
        monkeypatch.setenv(f"UCX_{shared}_FIFO_SIZE", "64")
    memory = np.zeros(4 << 20, np.uint8)
    pool = Context(memory.ctypes.data, memory.nbytes, writable=True, tls=tls)
    with monkeypatch.context() as deaf:
        deaf.setattr(asyncio.get_running_loop(), "add_reader", lambda *_: None)
        still = Channel(pool)
    near = Channel(pool)
    near.connect(still.address())
    # Below the rendezvous: pieces that set out without being asked for.
    pieces = [(memory.ctypes.data + offset, 31 << 10) for offset in range(0, memory.nbytes // 2, 31 << 10)]
    sent = near.move(pieces, Stop(), receives=False)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not sent.done()
    closed = near.close()
    for _ in range(2):
        await asyncio.sleep(0)
    assert closed.done()
    assert sent.result() == CLOSED
    await still.close()
    pool.free()


async def test_no_lane_is_for_a_keepalive(context: Context) -> None:
    """With one UCX 1.13 ends the process in the tests above over RDMA; this tells without RDMA, in any release."""
    near, far = Channel(context), Channel(context)
    try:
        near.connect(far.address())
        text = near.describe()
    finally:
        await asyncio.gather(near.close(), far.close())
    assert "lane[0]" in text
    assert "keepalive" not in text
