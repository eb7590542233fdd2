from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from record_wire import recorded

from protocol.codec import HEADER, MAX_FRAME_BYTES, OLDEST, VERSION, encode
from protocol.errors import ConfigError, MalformedFrame, ProtocolError, StartFailed, VersionMismatch
from protocol.ids import Peer, RequestKey
from protocol.messages import Cancel, Prefill, Settle
from protocol.sampling import SamplingParams
from protocol.sockets import Hub, Spoke

ROUTER, WORKER = Peer("router", 1), Peer("worker", 5)


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
async def hub(context: zmq.asyncio.Context) -> AsyncIterator[Hub]:
    made = Hub(context, ROUTER, "tcp://127.0.0.1:0")
    yield made
    made.close()


def settle(number: int) -> Settle:
    return Settle(key=RequestKey("r", number))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 -- the other side's socket tells of no event
            await asyncio.sleep(0.005)


async def test_a_frame_goes_both_ways_in_order(context: zmq.asyncio.Context, hub: Hub) -> None:
    spoke = Spoke(context, WORKER, hub.endpoint)
    for number in range(100):
        assert spoke.send(settle(number))
    identities = set()
    for number in range(100):
        identity, envelope = await hub.receive()
        identities.add(identity)
        assert (envelope.sender, envelope.body) == (WORKER, settle(number))
    assert identities == {str(WORKER).encode()}
    assert hub.send(identity, settle(7))
    envelope = await spoke.receive()
    assert (envelope.sender, envelope.body) == (ROUTER, settle(7))
    spoke.close()


async def test_sending_to_nobody_says_so_at_once(hub: Hub) -> None:
    assert not hub.send(b"nobody", settle(0))


async def test_a_closed_spoke_is_noticed(context: zmq.asyncio.Context, hub: Hub) -> None:
    spoke = Spoke(context, WORKER, hub.endpoint)
    spoke.send(settle(0))
    identity, _ = await hub.receive()
    assert hub.send(identity, settle(1))
    spoke.close()
    await until(lambda: not hub.send(identity, settle(2)))


async def test_a_spoke_that_connects_before_the_hub_is_there_is_heard(context: zmq.asyncio.Context) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    spoke = Spoke(context, WORKER, endpoint)
    assert spoke.send(settle(3))
    hub = Hub(context, ROUTER, endpoint)
    async with asyncio.timeout(60):
        _, envelope = await hub.receive()
    assert envelope.body == settle(3)
    hub.close()
    spoke.close()


async def test_a_spoke_finds_a_hub_that_was_restarted(context: zmq.asyncio.Context, hub: Hub) -> None:
    spoke = Spoke(context, WORKER, hub.endpoint)
    spoke.send(settle(0))
    await hub.receive()
    endpoint = hub.endpoint
    hub.close()

    def port_is_free() -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return probe.connect_ex(("127.0.0.1", int(endpoint.rsplit(":", 1)[1]))) != 0

    await until(port_is_free)
    fresh = Hub(context, Peer("router", 2), endpoint)
    heard = asyncio.create_task(fresh.receive())
    await until(lambda: spoke.send(settle(1)) and heard.done())
    assert heard.result()[1].sender == WORKER
    fresh.close()
    spoke.close()


async def test_a_reconnecting_peer_takes_its_identity_over(context: zmq.asyncio.Context, hub: Hub) -> None:
    first = Spoke(context, WORKER, hub.endpoint)
    first.send(settle(0))
    identity, _ = await hub.receive()
    second = Spoke(context, WORKER, hub.endpoint)
    second.send(settle(1))
    assert (await hub.receive())[0] == identity
    assert hub.send(identity, settle(2))
    async with asyncio.timeout(60):
        assert (await second.receive()).body == settle(2)
    first.close()
    second.close()


async def test_a_bad_frame_raises_once_and_the_next_is_heard(context: zmq.asyncio.Context, hub: Hub) -> None:
    raw = context.socket(zmq.DEALER)
    raw.connect(hub.endpoint)
    await raw.send(b"GET / HTTP/1.1")
    await raw.send(b"KF\x09junk")
    with pytest.raises(MalformedFrame):
        await hub.receive()
    with pytest.raises(VersionMismatch):
        await hub.receive()
    spoke = Spoke(context, WORKER, hub.endpoint)
    spoke.send(settle(4))
    assert (await hub.receive())[1].body == settle(4)
    spoke.close()
    raw.close(linger=0)


async def test_two_of_this_release_speak_its_version_from_the_first_answer_on(
    context: zmq.asyncio.Context, hub: Hub
) -> None:
    raw = context.socket(zmq.ROUTER)
    port = raw.bind_to_random_port("tcp://127.0.0.1")
    spoke = Spoke(context, WORKER, f"tcp://127.0.0.1:{port}", watched=True)
    spoke.send(settle(1))
    identity, opening = await raw.recv_multipart()
    assert opening[:3] == b"KF" + bytes([OLDEST]), "nobody knows yet what answers there"
    await raw.send_multipart([identity, encode(hub.me, settle(2))])
    await spoke.receive()
    spoke.send(settle(3))
    assert (await raw.recv_multipart())[1][:3] == HEADER
    # Another process may be there when it comes back.
    await spoke.connected()
    spoke.send(settle(4))
    assert (await raw.recv_multipart())[1][2] == OLDEST
    spoke.close()
    raw.close(linger=0)


async def test_a_peer_of_the_release_before_is_answered_in_its_version(context: zmq.asyncio.Context, hub: Hub) -> None:
    older, newer = (context.socket(zmq.DEALER) for _ in range(2))
    recording = Path(__file__).with_name(f"wire_{OLDEST}.frames")
    for raw, frame, version in (
        (older, next(recorded(recording)), OLDEST),
        (newer, encode(WORKER, settle(1), OLDEST), VERSION),
        (older, next(recorded(recording)), OLDEST),
    ):
        raw.connect(hub.endpoint)
        await raw.send(frame)
        identity, _ = await hub.receive()
        assert hub.send(identity, settle(7))
        assert (await raw.recv())[2] == version
    await older.send(HEADER[:2] + bytes([OLDEST - 1]) + frame[3:])
    with pytest.raises(VersionMismatch, match=rf"version {OLDEST - 1}, this process speaks {OLDEST} to {VERSION}"):
        await hub.receive()
    older.close(linger=0)
    newer.close(linger=0)


async def test_what_an_older_peer_would_not_understand_is_not_sent(
    context: zmq.asyncio.Context, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocol.codec.SINCE", {Settle: VERSION})
    spoke = Spoke(context, WORKER, hub.endpoint)
    assert not spoke.send(settle(1))
    assert spoke.send(Cancel(key=RequestKey("r", 1)))
    identity, _ = await hub.receive()
    assert hub.send(identity, settle(2))
    assert (await spoke.receive()).body == settle(2)
    assert spoke.send(settle(3))
    spoke.close()


async def test_a_frame_over_the_bound_never_arrives(context: zmq.asyncio.Context, hub: Hub) -> None:
    raw = context.socket(zmq.DEALER)
    raw.connect(hub.endpoint)
    await raw.send(b"\x00" * (MAX_FRAME_BYTES + 1))
    spoke = Spoke(context, WORKER, hub.endpoint)
    spoke.send(settle(5))
    async with asyncio.timeout(60):
        assert (await hub.receive())[1].body == settle(5)
    spoke.close()
    raw.close(linger=0)


async def test_sending_over_the_bound_is_refused_at_home(context: zmq.asyncio.Context, hub: Hub) -> None:
    spoke = Spoke(context, WORKER, hub.endpoint)
    huge = Prefill(key=RequestKey("r", 0), token_ids=(1 << 30,) * 4_000_000, sampling=SamplingParams(), handoff=None)
    with pytest.raises(ProtocolError):
        spoke.send(huge)
    spoke.send(settle(6))
    assert (await hub.receive())[1].body == settle(6)
    spoke.close()


async def test_a_peer_that_never_reads_does_not_block_the_sender(context: zmq.asyncio.Context, hub: Hub) -> None:
    spoke = Spoke(context, WORKER, hub.endpoint)
    spoke.send(settle(0))
    identity, _ = await hub.receive()
    body = Cancel(key=RequestKey("r", 0), reason="x" * 2000)
    begun = time.monotonic()
    accepted = sum(hub.send(identity, body) for _ in range(20_000))
    assert accepted == 20_000
    assert time.monotonic() - begun < 30
    spoke.close()


async def test_an_address_that_is_taken_or_none_is_named_and_leaves_nothing_open() -> None:
    context = zmq.asyncio.Context()
    hub = Hub(context, Peer("r", 1), "tcp://127.0.0.1:0")
    with pytest.raises(StartFailed, match=hub.endpoint):
        Hub(context, Peer("s", 1), hub.endpoint)
    with pytest.raises(ConfigError, match="nowhere") as caught:
        Spoke(context, Peer("w", 1), "nowhere")
    assert caught.value.field == "endpoint"
    hub.close()
    # It would wait for ever for a socket that was left open.
    await asyncio.wait_for(asyncio.to_thread(context.term), 60)


@pytest.fixture
async def watching(context: zmq.asyncio.Context) -> AsyncIterator[Hub]:
    made = Hub(context, ROUTER, "tcp://127.0.0.1:0", watched=True)
    yield made
    made.close()


async def test_a_watched_hub_is_told_who_left(context: zmq.asyncio.Context, watching: Hub) -> None:
    others = [Spoke(context, Peer(f"other-{index}", 1), watching.endpoint) for index in range(3)]
    spoke = Spoke(context, WORKER, watching.endpoint)
    left = asyncio.create_task(watching.left())
    # A frame may be read before its connection's beginning is; one that comes after that names it.
    named = watching._connections._owners
    async with asyncio.timeout(60):
        while len(named) < 4:
            for each in (*others, spoke):
                each.send(settle(0))
                await watching.receive()
    spoke.close()
    assert await asyncio.wait_for(left, 60) == str(WORKER).encode()
    others[1].close()
    assert await asyncio.wait_for(watching.left(), 60) == b"other-1@1"
    for other in (others[0], others[2]):
        other.close()


async def test_a_watched_spoke_is_told_of_each_connection(context: zmq.asyncio.Context, hub: Hub) -> None:
    spoke = Spoke(context, WORKER, hub.endpoint, watched=True)
    await asyncio.wait_for(spoke.connected(), 60)
    again = asyncio.create_task(spoke.connected())
    endpoint = hub.endpoint
    hub.close()
    fresh: list[Hub] = []

    def bound() -> bool:
        try:
            fresh.append(Hub(context, Peer("router", 2), endpoint))
        except StartFailed:
            return False
        return True

    await until(bound)
    await asyncio.wait_for(again, 60)
    fresh[0].close()
    spoke.close()
