"""KV over TCP: vectored socket I/O straight from and into the pools, several streams, a few I/O threads per end.

``wire`` holds the bytes; ``handshake`` the hello, ``serving`` and ``delivery`` the two sides' conversations, as
generators that do no I/O; ``steps``, ``link``, ``io_thread`` and ``loop_links`` run them; ``receiver``, ``sender`` and
between them ``destination``, ``lane`` and ``channel`` face the event loop.
"""

from __future__ import annotations

from kv_transfer.tcp.receiver import TcpReceiver
from kv_transfer.tcp.sender import TcpSender
from kv_transfer.transport import Receiver, Sender, TransportConfig


def receiver(bind: str, memory: memoryview, config: TransportConfig) -> Receiver:
    """A receiver that listens at ``bind``."""
    return TcpReceiver(bind, memory, config)


def sender(memory: memoryview, config: TransportConfig) -> Sender:
    """A sender; it needs no address of its own."""
    return TcpSender(memory, config)


__all__ = ["TcpReceiver", "TcpSender", "receiver", "sender"]
