"""KV over UCX: the receiver reads the sender's pool with one-sided gets, over RDMA, shared memory or TCP.

A *channel* is a TCP connection for descriptors and answers, and on either end a UCX worker with one endpoint; it
carries one part of a ship at a time. The sender describes what to read; the receiver checks that against its windows,
reads it straight into the granted blocks, and answers. So the receiver alone writes the receiver's memory, and a window
is quiet when its own gets have ended.

``shim.c`` is what we use of libucp, ``build`` makes and ``library`` loads it, ``channel`` drives one worker from a
thread's own event loop (``loop_thread``), ``wire`` holds the bytes of the TCP connection, ``serving`` and ``delivery``
the two sides' conversations, ``receiver``, ``destination`` and ``sender`` face the caller. ``report`` says what UCX can
do on this machine.
"""

from __future__ import annotations

from kv_transfer.transport import Receiver, Sender, TransportConfig
from kv_transfer.ucx.receiver import UcxReceiver
from kv_transfer.ucx.report import Report, describe
from kv_transfer.ucx.sender import UcxSender


def receiver(bind: str, memory: memoryview, config: TransportConfig) -> Receiver:
    """A receiver whose descriptors arrive at ``bind``."""
    return UcxReceiver(bind, memory, config)


def sender(memory: memoryview, config: TransportConfig) -> Sender:
    """A sender; it needs no address of its own."""
    return UcxSender(memory, config)


__all__ = ["Report", "UcxReceiver", "UcxSender", "describe", "receiver", "sender"]
