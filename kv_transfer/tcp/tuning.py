"""Socket options that both ends of a connection set alike."""

from __future__ import annotations

import socket

from kv_transfer.transport import TransportConfig

KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
"""An idle connection through a stateful firewall stays known to it; a vanished host is noticed within a minute."""


def tune(connection: socket.socket, config: TransportConfig) -> None:
    """Set latency, keep-alive and buffer options."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if config.buffer_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.buffer_bytes)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, config.buffer_bytes)
