"""KV by ucxx, RAPIDS' Python binding of UCX, or by its forerunner ucx-py: what stands in for ``ucx``.

After a receive was cancelled, and after its endpoint was closed, bytes have landed. So ucxx is kept in a process of
its own, away from both pools: see :mod:`kv_transfer.carried`.
"""

from __future__ import annotations

from kv_transfer.carried.library import UCXX
from kv_transfer.carried.receiver import CarriedReceiver
from kv_transfer.carried.sender import CarriedSender
from kv_transfer.transport import Receiver, Sender, TransportConfig


def receiver(bind: str, memory: memoryview, config: TransportConfig) -> Receiver:
    """A receiver that is announced to at ``bind``."""
    return CarriedReceiver(UCXX, bind, memory, config)


def sender(memory: memoryview, config: TransportConfig) -> Sender:
    """A sender; it needs no address of its own."""
    return CarriedSender(UCXX, memory, config)


def describe() -> str:
    """Whether ucxx is here, and what is proved with it, in one line. Never raises."""
    return UCXX.describe("quiet by staging, in a process of its own; no RDMA with UCX of the wheel")


def why_unusable() -> str | None:
    """Why it cannot be used here; None when it can."""
    return UCXX.why_unusable()


__all__ = ["describe", "receiver", "sender", "why_unusable"]
