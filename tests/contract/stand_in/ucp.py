"""The calls of ucx-py that kvferry makes, over a plain TCP connection, for machines that have neither it nor ucxx."""

import asyncio
import os
import socket
import struct

HEAD = struct.Struct("!QI")
FLIP = "STAND_IN_FLIPS"
"""Set in the environment, it has the first bit of each message changed on its way."""

_listener: socket.socket | None = None
_connection: socket.socket | None = None
_turn = asyncio.Lock()


def init(*, blocking_progress_mode: bool) -> None:
    global _listener
    assert not blocking_progress_mode
    _listener = socket.create_server(("127.0.0.1", 0))
    _listener.setblocking(False)


def get_ucx_version() -> tuple[int, int, int]:
    return (1, 0, 0)


def get_worker_address() -> bytes:
    assert _listener is not None
    return struct.pack("!H", _listener.getsockname()[1])


def get_ucx_address_from_buffer(buffer: bytes) -> int:
    return int(struct.unpack("!H", buffer)[0])


async def recv(buffer: memoryview, tag: int) -> None:
    global _connection
    loop = asyncio.get_running_loop()
    async with _turn:
        if _connection is None:
            _connection, _ = await loop.sock_accept(_listener)
        head = bytearray(HEAD.size)
        await _filled(_connection, memoryview(head))
        assert HEAD.unpack(head) == (tag, buffer.nbytes)
        await _filled(_connection, memoryview(buffer))


async def _filled(connection: socket.socket, view: memoryview) -> None:
    while view.nbytes:
        count = await asyncio.get_running_loop().sock_recv_into(connection, view)
        assert count, "the peer is gone"
        view = view[count:]


class Endpoint:
    closed = False

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    async def send(self, buffer: memoryview, tag: int, force_tag: bool) -> None:
        assert force_tag
        async with _turn:
            loop = asyncio.get_running_loop()
            if FLIP in os.environ:
                buffer[0] ^= 1
            await loop.sock_sendall(self._connection, HEAD.pack(tag, buffer.nbytes))
            await loop.sock_sendall(self._connection, memoryview(buffer))

    def abort(self) -> None:
        self._connection.close()


async def create_endpoint_from_worker_address(address: int) -> Endpoint:
    connection = socket.create_connection(("127.0.0.1", address))
    connection.setblocking(False)
    return Endpoint(connection)


def reset() -> None:
    if _listener is not None:
        _listener.close()
