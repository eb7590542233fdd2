"""``ucx://host:port``: where the descriptors' TCP connection is made; UCX's own addresses travel in the hello."""

from __future__ import annotations

from kv_transfer.tcp import address as tcp_address
from kv_transfer.tcp.address import Endpoint
from protocol.errors import ConfigError

SCHEME = "ucx"


def form(host: str, port: int) -> str:
    """The URI of a host and a port."""
    return SCHEME + tcp_address.form(host, port).removeprefix("tcp")


def as_tcp(address: str) -> str:
    """The same place as a ``tcp://`` address.

    Raises:
        ConfigError: it is not of the form ``ucx://host:port``.
    """
    if not address.startswith(f"{SCHEME}://"):
        raise ConfigError(f"address must be ucx://host:port, got {address!r}", field="address")
    return "tcp" + address.removeprefix(SCHEME)


def resolve_bound(address: str) -> Endpoint:
    """Where to bind for ``address``; errors as :func:`kv_transfer.tcp.address.resolve_bound`."""
    return tcp_address.resolve_bound(as_tcp(address))


async def resolve(address: str) -> Endpoint:
    """Where to connect for ``address``; errors as :func:`kv_transfer.tcp.address.resolve`."""
    return await tcp_address.resolve(as_tcp(address))
