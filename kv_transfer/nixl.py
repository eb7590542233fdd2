"""KV by NVIDIA's NIXL, where it is installed: the decode worker's carrier reads what the prefill worker's has staged.

NIXL cannot prove its own quiet: after a request was released and the peer removed, bytes have landed when a stopped
peer went on. Nor does it keep the process that is read from alive when a reader over TCP dies. So it is kept in a
process of its own, away from both pools: see :mod:`kv_transfer.carried`.
"""

from __future__ import annotations

from kv_transfer.carried.library import NIXL
from kv_transfer.carried.receiver import CarriedReceiver
from kv_transfer.carried.sender import CarriedSender
from kv_transfer.transport import Receiver, Sender, TransportConfig


def receiver(bind: str, memory: memoryview, config: TransportConfig) -> Receiver:
    """A receiver that is announced to at ``bind``."""
    return CarriedReceiver(NIXL, bind, memory, config)


def sender(memory: memoryview, config: TransportConfig) -> Sender:
    """A sender; it needs no address of its own."""
    return CarriedSender(NIXL, memory, config)


def describe() -> str:
    """Whether NIXL is here, and what is proved with it, in one line. Never raises."""
    return NIXL.describe("quiet by staging (NIXL itself proves none), in a process of its own")


def why_unusable() -> str | None:
    """Why it cannot be used here; None when it can."""
    return NIXL.why_unusable()


__all__ = ["describe", "receiver", "sender", "why_unusable"]
