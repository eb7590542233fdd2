"""Ports of this machine."""

from __future__ import annotations

import socket

from protocol.errors import StartFailed


def bound_port(host: str, port: int, field: str) -> int:
    """The port, or a free one for 0, after it was bound for a moment.

    Args:
        host: address to bind; "" for all.
        port: to bind.
        field: of the cluster file, for the error.

    Raises:
        StartFailed: it cannot be bound; names the field and the address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartFailed(
                f"{field}: cannot listen on {host}:{port}: {error.strerror or error}", field=field
            ) from error
        return int(probe.getsockname()[1])
