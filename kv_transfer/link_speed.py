"""How fast this host's network is, as the system has it: what routers expect of a link before it is measured.

Between hosts KV goes by the interface that has the address which others reach this host at, or by RDMA. What the
system does not know, as of virtual interfaces, and the loopback, is told as 0.
"""

from __future__ import annotations

import socket
from pathlib import Path

import psutil

RDMA_DEVICES = Path("/sys/class/infiniband")
BY_RDMA = frozenset({"ucx", "ucxx", "nixl"})
"""Transports that take an RDMA device where there is one."""
GBIT = 1e9 / 8
"""Bytes per second."""


def link_rate(mode: str, host: str, gbit: float | None = None, *, devices: Path = RDMA_DEVICES) -> float:
    """Bytes per second that KV could reach between this host and others; 0 where that is not known.

    Args:
        mode: a scheme, or ``auto``.
        host: address that others reach this host at.
        gbit: what it is in Gbit/s, where somebody knows better than the system.
        devices: where the kernel shows RDMA devices.
    """
    if gbit is not None:
        return GBIT * gbit
    rdma = _rdma_gbit(devices) if mode in BY_RDMA else 0.0
    return GBIT * (rdma or _interface_gbit(host))


def _interface_gbit(host: str) -> float:
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return 0.0
    states = psutil.net_if_stats()
    return max(
        (
            states[name].speed / 1e3
            for name, known in psutil.net_if_addrs().items()
            if name in states and any(each.address.partition("%")[0] in addresses for each in known)
        ),
        default=0.0,
    )


def _rdma_gbit(devices: Path) -> float:
    """Of the fastest active port."""
    return max((_port_gbit(port) for port in devices.glob("*/ports/*")), default=0.0)


def _port_gbit(port: Path) -> float:
    """The kernel writes ``100 Gb/sec (4X EDR)``."""
    try:
        if "ACTIVE" not in (port / "state").read_text():
            return 0.0
        return float((port / "rate").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
