"""Hubs and spokes of a cluster that has a secret: who has another, or none, is neither heard nor answered."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio

from protocol.curve import CurveKeys
from protocol.errors import AuthenticationFailed
from protocol.ids import Peer, RequestKey
from protocol.messages import Cancel
from protocol.sockets import Hub, Spoke

SECRET = "the secret of this cluster"
KEYS, OTHER = CurveKeys.drawn_from(SECRET), CurveKeys.drawn_from("the secret of another one")
ROUTER, WORKER = Peer("router", 1), Peer("worker", 5)
MARK = "a reason that nobody else shall read"


def cancel(reason: str = MARK) -> Cancel:
    return Cancel(key=RequestKey("r", 1), reason=reason)


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


async def test_who_knows_the_secret_is_heard_and_answered(context: zmq.asyncio.Context) -> None:
    hub = Hub(context, ROUTER, "tcp://127.0.0.1:0", keys=KEYS)
    spoke = Spoke(context, WORKER, hub.endpoint, keys=CurveKeys.drawn_from(SECRET), watched=True)
    await asyncio.wait_for(spoke.connected(), 60)
    spoke.send(cancel())
    identity, envelope = await asyncio.wait_for(hub.receive(), 60)
    assert envelope.body == cancel()
    assert hub.send(identity, cancel("back"))
    assert (await asyncio.wait_for(spoke.receive(), 60)).body == cancel("back")
    hub.close()
    spoke.close()


@pytest.mark.parametrize(
    ("hub_keys", "spoke_keys"), [(KEYS, OTHER), (KEYS, None), (None, KEYS)], ids=["another", "none", "hub has none"]
)
async def test_who_does_not_is_not_heard(
    context: zmq.asyncio.Context, hub_keys: CurveKeys | None, spoke_keys: CurveKeys | None
) -> None:
    hub = Hub(context, ROUTER, "tcp://127.0.0.1:0", keys=hub_keys)
    stranger = Spoke(context, Peer("stranger", 1), hub.endpoint, keys=spoke_keys, watched=True)
    stranger.send(cancel())
    with pytest.raises(AuthenticationFailed, match=hub.endpoint):
        await asyncio.wait_for(stranger.connected(), 60)
    friend = Spoke(context, WORKER, hub.endpoint, keys=hub_keys)
    friend.send(cancel())
    assert (await asyncio.wait_for(hub.receive(), 60))[1].sender == WORKER
    # The first frame came from the friend, and no other is there.
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(hub.receive(), 0.2)
    for each in (hub, stranger, friend):
        each.close()


@pytest.mark.parametrize("keys", [KEYS, None], ids=["keys", "none"])
async def test_a_spoke_tells_nothing_to_a_hub_without_the_secret(
    context: zmq.asyncio.Context, keys: CurveKeys | None
) -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        spoke = Spoke(context, WORKER, f"tcp://127.0.0.1:{listener.getsockname()[1]}", keys=keys)
        spoke.send(cancel())
        connection, _ = await asyncio.wait_for(loop.sock_accept(listener), 60)
        said = bytearray()
        with connection, contextlib.suppress(TimeoutError, ConnectionError):
            # The greeting of a server that asks for no security, and its READY.
            connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + b"\x01" + bytes(31))
            connection.sendall(b"\x04\x06\x05READY")
            while MARK.encode() not in said and (
                chunk := await asyncio.wait_for(loop.sock_recv(connection, 4096), 0.5 if keys else 60)
            ):
                said += chunk
        told = {MARK.encode() in said, str(WORKER).encode() in said}
        assert told == {keys is None}
        spoke.close()


async def test_what_is_said_cannot_be_read_on_the_wire(context: zmq.asyncio.Context) -> None:
    for keys, legible in ((None, True), (KEYS, False)):
        hub = Hub(context, ROUTER, "tcp://127.0.0.1:0", keys=keys)
        heard = bytearray()
        loop = asyncio.get_running_loop()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: bytearray = heard) -> None:
            while chunk := await reader.read(65536):
                heard += chunk
                writer.write(chunk)
            writer.close()

        async def between(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int = int(hub.endpoint.rsplit(":", 1)[1])
        ) -> None:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(relay(reader, there_writer), relay(there_reader, writer), return_exceptions=True)

        server = await asyncio.start_server(between, "127.0.0.1", 0)
        spoke = Spoke(context, WORKER, f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", keys=keys)
        spoke.send(cancel())
        assert (await asyncio.wait_for(hub.receive(), 60))[1].body == cancel()
        assert (MARK.encode() in heard) is legible
        spoke.close()
        hub.close()
        server.close()
        await server.wait_closed()
        others = asyncio.all_tasks(loop) - {asyncio.current_task()}
        await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), 60)


def test_keys_are_the_same_everywhere_and_shown_nowhere() -> None:
    assert CurveKeys.drawn_from("") is None
    assert CurveKeys.drawn_from(SECRET) == KEYS
    assert KEYS is not None
    assert OTHER is not None
    drawn = {pair.private for keys in (KEYS, OTHER) for pair in (keys.hub, keys.spoke)}
    assert len(drawn) == 4
    for key in (KEYS.hub.public, KEYS.hub.private, KEYS.spoke.public, KEYS.spoke.private):
        assert key.decode() not in repr(KEYS)
