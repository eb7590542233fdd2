"""``shm://name`` and ``cuda_ipc://name``: names of abstract Unix sockets, which end with the process that has them."""

from __future__ import annotations

import os
import re
import secrets
import socket
import struct
import sys

from protocol.errors import ChannelLost, ConfigError

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
PREFIX = "\0kvferry/"
CREDENTIALS = struct.Struct("3i")


def name_of(address: str, scheme: str = "shm") -> str:
    """The socket name of ``shm://name``; a fresh, unguessable one for ``shm://*``.

    Args:
        address: of a receiver.
        scheme: that it must be of.

    Raises:
        ConfigError: it is not of that form, or this system has no memfd.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigError(f"the {scheme} transport needs Linux, got {sys.platform}", field="transport")
    found, _, name = address.partition("://")
    if name == "*":
        name = secrets.token_hex(16)
    if found != scheme or not NAME.fullmatch(name):
        raise ConfigError(f"address must be {scheme}://name, got {address!r}", field="address")
    return name


def listen(name: str, backlog: int) -> socket.socket:
    """A listening socket of that name.

    Raises:
        ConfigError: the name is taken.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(PREFIX + name)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at {name!r}: {error}", field="address") from error
    return listener


def connect(address: str) -> socket.socket:
    """A non-blocking connection to who listens at ``address``, a process of our own user.

    Raises:
        ConfigError: the address is malformed.
        ChannelLost: nobody listens there, too many wait to connect, or it is another user's process.
    """
    name = name_of(address, address.partition("://")[0])
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connection.connect(PREFIX + name)
        check_user(connection)
    except OSError as error:
        connection.close()
        raise ChannelLost(f"cannot connect to {address}: {error}") from error
    except ChannelLost:
        connection.close()
        raise
    return connection


def check_user(connection: socket.socket) -> int:
    """The process id of the other end, as it is known here; raise unless it is a process of our own user.

    Raises:
        ChannelLost: it is not; an abstract name has no permissions, so this is what guards the pool.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    process, user, _ = CREDENTIALS.unpack(raw)
    if user != os.geteuid():
        raise ChannelLost(f"the process at the other end is user {user}'s, this is user {os.geteuid()}'s")
    return int(process)


def why_unreachable(address: str) -> str | None:
    """Why nobody can be reached at ``address`` from here; None when somebody can."""
    try:
        connect(address).close()
    except (ChannelLost, ConfigError) as error:
        return error.message
    return None
