"""What KV travels by, from a prefill worker to a decode worker."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from protocol.errors import ConfigError

REACHED = 0.8
"""Of a link's nominal rate, what bulk transfers come to."""
_RATE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) ?(?:gbps|gbit/s)", re.IGNORECASE)
_MAX_GBPS = 100_000.0


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of a link that each worker has to itself.

    Attributes:
        name: for a person.
        rate: bytes a second that transfers come to.
    """

    name: str
    rate: float


def _of(name: str, gbps: float) -> Link:
    return Link(name=name, rate=gbps / 8 * 1e9 * REACHED)


LINKS: Mapping[str, Link] = MappingProxyType(
    {
        "nvlink": _of("NVLink 4, 450 GB/s", 3600),
        "pcie5": _of("PCIe 5 x16, 63 GB/s", 504),
        "rdma-400": _of("RDMA, 400 Gbit/s", 400),
        "rdma-200": _of("RDMA, 200 Gbit/s", 200),
        "tcp-100": _of("TCP, 100 Gbit/s", 100),
        "tcp-25": _of("TCP, 25 Gbit/s", 25),
        "tcp-10": _of("TCP, 10 Gbit/s", 10),
    }
)


def link(name: str) -> Link:
    """One of :data:`LINKS`, or of a rate such as ``50gbps``.

    Raises:
        ConfigError: it is neither; lists the names.
    """
    if name.lower() in LINKS:
        return LINKS[name.lower()]
    found = _RATE.fullmatch(name.strip())
    if not found or not 0 < float(found[1]) <= _MAX_GBPS:
        known = ", ".join(LINKS)
        raise ConfigError(f"link must be a rate such as 50gbps, or one of: {known}; got {name!r}", field="link")
    return _of(f"{float(found[1]):g} Gbit/s", float(found[1]))
