"""Sockets of every transport that has a TCP connection: made, tuned, and closed again where that fails."""

from __future__ import annotations

import asyncio
import socket

from kv_transfer.tcp.address import Endpoint
from kv_transfer.tcp.tuning import tune
from kv_transfer.transport import TransportConfig
from protocol.errors import ConfigError

BACKLOG = 512


def listening(bind: str, endpoint: Endpoint, config: TransportConfig) -> socket.socket:
    """A non-blocking listener.

    Args:
        bind: what was asked for, to be named in an error.
        endpoint: what that comes to.
        config: buffer sizes.

    Raises:
        ConfigError: the address cannot be bound.
    """
    family, where = endpoint
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by accepted connections; after the accept it is too late for the window scale.
        tune(listener, config)
        listener.bind(where)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at {bind!r}: {error}", field="address") from error
    return listener


async def connected(endpoint: Endpoint, config: TransportConfig) -> socket.socket:
    """A non-blocking connection.

    Raises:
        OSError: nobody is there.
    """
    family, where = endpoint
    connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        tune(connection, config)
        await asyncio.get_running_loop().sock_connect(connection, where)
    except BaseException:
        connection.close()
        raise
    return connection
