"""The limit of TCP: the same bytes by a plain blocking socket and vectored calls, nothing around it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from protocol.errors import ConnectionFailed

BUFFERS_PER_CALL = 64
"""Of one ``sendmsg`` or ``recvmsg_into``; more brought nothing, and the kernel takes 1,024 at most."""
SOCKET_BUFFER_BYTES = 4 << 20
LANDED = b"\1"

T = TypeVar("T")


def listen(host: str) -> socket.socket:
    """A listener at a free port of ``host``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    # Inherited by the connection; after the accept it is too late for the window scale.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    listener.setblocking(False)
    return listener


async def connect(host: str, port: int) -> socket.socket:
    """A connection to such a listener.

    Raises:
        ConnectionFailed: nobody is there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(connection, (host, port))
    except OSError as error:
        connection.close()
        raise ConnectionFailed(f"no plain connection to {host}:{port}: {error}") from error
    connection.setblocking(True)
    return connection


async def ship(connection: socket.socket, buffers: Sequence[memoryview]) -> float:
    """Seconds of one round: from the first byte sent to the other side's word that all have landed.

    Raises:
        ConnectionFailed: the connection broke.
    """

    def round_trip() -> float:
        started = time.perf_counter()
        move(buffers, connection.sendmsg)
        if connection.recv(1) != LANDED:
            raise ConnectionFailed("the plain connection ended")
        return time.perf_counter() - started

    try:
        return await _in_thread(connection, round_trip)
    except OSError as error:
        raise ConnectionFailed(f"the plain connection broke: {error}") from error


async def serve(listener: socket.socket, buffers: Sequence[memoryview]) -> None:
    """Accept one connection and take rounds from it until it ends; closes both."""
    with listener:
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
    with connection:
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def receive(batch: Sequence[memoryview]) -> int:
            return connection.recvmsg_into(batch)[0]

        def rounds() -> None:
            with contextlib.suppress(OSError):
                while move(buffers, receive):
                    connection.sendall(LANDED)

        await _in_thread(connection, rounds)


def move(buffers: Sequence[memoryview], call: Callable[[Sequence[memoryview]], int]) -> bool:
    """Move all buffers by one vectored call after the other; False when a call moved nothing."""
    index = offset = 0
    while index < len(buffers):
        moved = call([buffers[index][offset:], *buffers[index + 1 : index + BUFFERS_PER_CALL]])
        if not moved:
            return False
        offset += moved
        while index < len(buffers) and offset >= buffers[index].nbytes:
            offset -= buffers[index].nbytes
            index += 1
    return True


async def _in_thread(connection: socket.socket, work: Callable[[], T]) -> T:
    """Run blocking ``work``; when cancelled, cut the connection and wait until the thread is out of it."""
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # the broken connection is our doing, and nobody is left to be told
        raise
