"""KV over UCX: tagged messages straight from pool to pool, over whatever UCX has: RDMA, shared memory or TCP.

A *channel* is a TCP connection for announcements and answers, and on either end a UCX worker with one endpoint; it
carries one part of a ship at a time. The sender announces a part; the receiver checks that against its windows, posts
receives for exactly the granted blocks, and says "go". A part that is cut short takes its channel with it, and what
proves a block quiet is that the worker that could have touched it is destroyed.

Why no one-sided gets, which are faster on paper: UCX 1.22 offers none on an endpoint that reports its peer's death,
except over RDMA; elsewhere it emulates them, and the emulation ends the *process* that is read from ("Fatal: unexpected
error") when the reader dies in the middle. Large messages go over RDMA without a copy too.

``shim.c`` is what we use of libucp, ``build`` makes and ``library`` loads it, ``channel`` drives one worker from a
thread's own event loop (``loop_thread``), ``wire`` holds the bytes of the TCP connection, ``serving`` and ``delivery``
the two sides' conversations, ``receiver``, ``destination`` and ``sender`` face the caller. ``report`` says what UCX can
do on this machine.

A GPU's memory goes the same way where an RDMA device reaches it (``gpudirect``), and is not taken where none does: what
passes host memory anyhow is better staged by the caller, who can keep it pinned. ``pool`` is what differs: what RDMA
has written is flushed before it is told of, and once a worker is destroyed under a move the device is waited for, which
may still carry out copies that UCX had queued.
"""

from __future__ import annotations

from kv_transfer.memory import DeviceMemory
from kv_transfer.transport import Receiver, Sender, TransportConfig
from kv_transfer.ucx.gpudirect import why_no_gpudirect
from kv_transfer.ucx.library import library
from kv_transfer.ucx.pool import GpuPool, HostPool, Pool
from kv_transfer.ucx.receiver import UcxReceiver
from kv_transfer.ucx.report import Report, describe
from kv_transfer.ucx.sender import UcxSender
from protocol.errors import ConfigError


def receiver(bind: str, memory: memoryview | DeviceMemory, config: TransportConfig) -> Receiver:
    """A receiver whose descriptors arrive at ``bind``."""
    return UcxReceiver(bind, _pool(memory, config, writable=True), config)


def sender(memory: memoryview | DeviceMemory, config: TransportConfig) -> Sender:
    """A sender; it needs no address of its own."""
    return UcxSender(_pool(memory, config, writable=False), config)


def why_not_on_device(memory: DeviceMemory, config: TransportConfig) -> str | None:
    """Why this memory cannot be sent from and received into where it is; None where it can."""
    return why_no_gpudirect(memory.device, config)


def _pool(memory: memoryview | DeviceMemory, config: TransportConfig, *, writable: bool) -> Pool:
    if not isinstance(memory, DeviceMemory):
        return HostPool(memory, writable=writable)
    reason = why_not_on_device(memory, config)
    if reason is not None:
        raise ConfigError(f"no GPUDirect: {reason}", field="gpudirect")
    return GpuPool(memory, writable=writable)


def why_unusable() -> str | None:
    """Why UCX cannot be used here; None when it can. Builds the shim if it is not there yet."""
    try:
        library()
    except ConfigError as error:
        return error.message
    return None


__all__ = [
    "Report",
    "UcxReceiver",
    "UcxSender",
    "describe",
    "receiver",
    "sender",
    "why_not_on_device",
    "why_unusable",
]
