"""What UCX can do on this machine, for people."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

from kv_transfer.ucx import build
from kv_transfer.ucx.library import MAX_REPORT, Context
from protocol.errors import ConfigError

INFINIBAND = Path("/sys/class/infiniband")
RDMA = ("rc", "dc", "ud")
_RESOURCE = re.compile(r"\s(\w+)/\S+\s*$", re.MULTILINE)
_LANE = re.compile(r"lane\[\d+\]:\s*\d+:(\w+)/")


@dataclass(frozen=True, slots=True)
class Report:
    """What was found.

    Attributes:
        usable: whether the ``ucx`` transport works here.
        source: which UCX it is, in words.
        version: of UCX; empty where it is not usable.
        transports: UCX's own names of what it can use here ("rc_mlx5", "tcp", "posix", "cma").
        rdma: whether one of them is RDMA.
        reason: why not usable, or why there is no RDMA; empty where there is.
    """

    usable: bool
    source: str
    version: str
    transports: tuple[str, ...]
    rdma: bool
    reason: str

    def __str__(self) -> str:
        if not self.usable:
            return f"ucx: not usable: {self.reason}"
        means = "RDMA" if self.rdma else f"no RDMA: {self.reason}"
        return f"ucx: UCX {self.version} ({self.source}), transports {', '.join(self.transports)}; {means}"


def describe() -> Report:
    """Look at UCX on this machine; builds the shim if it is not there yet. Never raises."""
    try:
        source = build.find_ucx()
        memory = ctypes.create_string_buffer(4096)
        context = Context(ctypes.addressof(memory), len(memory), writable=True)
    except ConfigError as error:
        return Report(False, "", "", (), False, error.message)
    try:
        buffer = ctypes.create_string_buffer(MAX_REPORT)
        context.library.calls.kvf_describe(context.handle, None, buffer, len(buffer))
        transports = resources(buffer.value.decode(errors="replace"))
        version = context.library.version
    finally:
        context.free()
    rdma = any(name.split("_")[0] in RDMA for name in transports)
    return Report(True, source.name, version, transports, rdma, "" if rdma else _why_no_rdma(source))


def resources(text: str) -> tuple[str, ...]:
    """Transports in what UCX prints about a context, each once."""
    lines = [line for line in text.splitlines() if "resource" in line]
    return tuple(dict.fromkeys(found[1] for line in lines if (found := _RESOURCE.search(line))))


def lanes(text: str) -> tuple[str, ...]:
    """Transports in what UCX prints about an endpoint, each once."""
    return tuple(dict.fromkeys(_LANE.findall(text)))


def _why_no_rdma(ucx: build.Installation) -> str:
    if ucx.libraries is not None and not list((ucx.libraries / "ucx").glob("libuct_ib*")):
        return f"{ucx.name} is built without verbs; install the system's UCX with its headers (libucx-dev)"
    devices = sorted(entry.name for entry in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    if not devices:
        return f"this machine has no RDMA device ({INFINIBAND} is empty)"
    return f"UCX does not use {', '.join(devices)}: the verbs library, the port's state or UCX_TLS may be why"
