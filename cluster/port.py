"""Ports of this machine."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

from cluster.config import ClusterConfig
from protocol.errors import StartFailed

OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST, LAST = 20000, 32767
"""Above the ports that Ray gives its workers, and below those that most kernels give to connections."""
TRIES = 64


def port_of(endpoint: str) -> int:
    """The port of ``tcp://host:port`` or of a URL without a path."""
    return int(endpoint.rpartition(":")[2])


def bound_port(host: str, port: int, field: str) -> int:
    """The port, or a free one for 0, after it was bound for a moment.

    Whoever is to listen there comes later, so it is not one that the kernel may give to a connection meanwhile.

    Args:
        host: address to bind; "" for all.
        port: to bind.
        field: of the cluster file, for the error.

    Raises:
        StartFailed: it cannot be bound; names the field and the address.
    """
    if not port:
        quiet = _quiet_ports()
        for _ in range(TRIES if quiet else 0):
            with suppress(StartFailed):
                return _bound(host, secrets.choice(quiet), field)
    return _bound(host, port, field)


def _quiet_ports() -> range:
    """Ports that only who names one gets."""
    try:
        lowest = int(OUTGOING.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        lowest = LAST + 1
    return range(FIRST, min(LAST + 1, lowest))


def _bound(host: str, port: int, field: str) -> int:
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


def free_hub_port(config: ClusterConfig, taken: Set[int]) -> int:
    """A port for workers to connect to: the file's, or the next one that is not ``taken``; without one, a free one.

    Raises:
        StartFailed: as :func:`bound_port`.
    """
    # Our own node serves this machine alone.
    host, port = "127.0.0.1" if config.ray.address is None else "", config.router.hub_port
    while True:
        chosen = bound_port(host, port, "router.hub_port") if port not in taken else port
        if chosen not in taken:
            return chosen
        port = port and port + 1
