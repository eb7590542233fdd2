"""``tcp://host:port`` addresses."""

from __future__ import annotations

import asyncio
import socket
from urllib.parse import urlsplit

from protocol.errors import ChannelLost, ConfigError

SocketAddress = tuple[str, int] | tuple[str, int, int, int]
Endpoint = tuple[int, SocketAddress]
"""``(address family, what connect and bind take)``."""


def parse(address: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``; an IPv6 host stands in square brackets.

    Raises:
        ConfigError: it is not of that form.
    """
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"address must be tcp://host:port, got {address!r}", field="address") from error
    if parts.scheme != "tcp" or not host or port is None or parts.path or parts.query or parts.username:
        raise ConfigError(f"address must be tcp://host:port, got {address!r}", field="address")
    return host, port


def form(host: str, port: int) -> str:
    """The URI of a host and a port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def resolve_bound(address: str) -> Endpoint:
    """Where to bind for ``address``.

    Raises:
        ConfigError: the host has no address.
    """
    host, port = parse(address)
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"address {address!r} does not resolve: {error}", field="address") from error
    return family, _narrowed(where)


async def resolve(address: str) -> Endpoint:
    """Where to connect for ``address``; a name is looked up without blocking the loop.

    Raises:
        ConfigError: it is not of the form ``tcp://host:port``.
        ChannelLost: the host has no address.
    """
    host, port = parse(address)
    numeric = socket.AI_NUMERICHOST
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=numeric)[0]
        return family, _narrowed(where)
    except socket.gaierror:
        pass
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ChannelLost(f"{address} does not resolve: {error}") from error
    return found[0][0], _narrowed(found[0][4])


def _narrowed(where: tuple[object, ...]) -> SocketAddress:
    if len(where) == 4:
        return str(where[0]), int(str(where[1])), int(str(where[2])), int(str(where[3]))
    return str(where[0]), int(str(where[1]))
