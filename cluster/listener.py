"""A listening socket on its way from one process to another: both of one user, on one machine.

Both have the one socket then, with its one queue: whoever connects is served by either, and either may close it with
nobody lost.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading

OFFER_SECONDS = 10.0
"""In which the other process must have asked."""
NAME_BYTES = 16
_CREDENTIALS = struct.Struct("3i")


def offer(listener: socket.socket) -> str:
    """Give a socket to the first process of this user that asks, in a thread of its own; :func:`take` takes it.

    Returns:
        Where to ask: a name that nobody can guess, and that is no file.
    """
    name = f"kvferry-{secrets.token_hex(NAME_BYTES)}"
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    door.bind(_address(name))
    door.listen(1)
    door.settimeout(OFFER_SECONDS)
    threading.Thread(target=_give, args=(door, listener.dup()), name="hand-over", daemon=True).start()
    return name


def take(name: str) -> socket.socket:
    """The socket that is offered there; blocking.

    Raises:
        OSError: nobody offers one there (any more), or somebody else does.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(OFFER_SECONDS)
        asking.connect(_address(name))
        if _user_at(asking) != os.getuid():
            raise PermissionError(f"{name} is offered by another user")
        _, descriptors, _, _ = socket.recv_fds(asking, 1, 1)
    if not descriptors:
        raise ConnectionError(f"nothing came from {name}")
    return socket.socket(fileno=descriptors[0])


def _give(door: socket.socket, given: socket.socket) -> None:
    with door, given, contextlib.suppress(OSError):
        asking, _ = door.accept()
        with asking:
            asking.settimeout(OFFER_SECONDS)
            if _user_at(asking) == os.getuid():
                socket.send_fds(asking, [b"\0"], [given.fileno()])


def _address(name: str) -> str:
    # A leading zero byte: Linux keeps such a name itself, for as long as somebody listens there.
    return f"\0{name}"


def _user_at(connection: socket.socket) -> int:
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(told)[1]
    return user
