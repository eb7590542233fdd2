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
"""

from __future__ import annotations

from kv_transfer.transport import Receiver, Sender, TransportConfig
from kv_transfer.ucx.library import library
from kv_transfer.ucx.receiver import UcxReceiver
from kv_transfer.ucx.report import Report, describe
from kv_transfer.ucx.sender import UcxSender
from protocol.errors import ConfigError


def receiver(bind: str, memory: memoryview, config: TransportConfig) -> Receiver:
    """A receiver whose descriptors arrive at ``bind``."""
    return UcxReceiver(bind, memory, config)


def sender(memory: memoryview, config: TransportConfig) -> Sender:
    """A sender; it needs no address of its own."""
    return UcxSender(memory, config)


def why_unusable() -> str | None:
    """Why UCX cannot be used here; None when it can. Builds the shim if it is not there yet."""
    try:
        library()
    except ConfigError as error:
        return error.message
    return None


__all__ = ["Report", "UcxReceiver", "UcxSender", "describe", "receiver", "sender", "why_unusable"]
