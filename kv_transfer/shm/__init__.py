"""KV through shared memory, between processes of one host: the receiver copies straight from the sender's pool.

The sender's pool lies in a memfd. Over an abstract Unix socket, once both ends have proved themselves, it passes read
access to it, and a :mod:`ledger <kv_transfer.shm.ledger>`; each ship is then a small frame that says which bytes belong
where, and one answer. There is one copy and no staging. Whoever can connect to the socket is on the same host, in the
same network namespace.

What makes it safe:

* The receiver writes only through its own windows and gates, as every transport does; a sender's death or stop changes
  nothing, for the mapping stays.
* The sender may withdraw a ship at any time: it strikes the ship's ledger entry, and waits until the receiver is not
  between two looks at it. The kernel keeps "is between two looks" as a file lock, which a death gives back and a
  stopped process keeps.
* Nothing has a name in a file system, so a killed process leaves nothing behind. Both ends must have one user id.
* The memory is sealed against shrinking, so no peer can make a read fault.
"""

from __future__ import annotations

from kv_transfer.shm.endpoint import why_unreachable
from kv_transfer.shm.receiver import ShmReceiver
from kv_transfer.shm.sender import ShmSender
from kv_transfer.shm.source import SealedSource
from kv_transfer.shm.target import HostTarget
from kv_transfer.transport import Receiver, Sender, TransportConfig


def receiver(bind: str, memory: memoryview, config: TransportConfig) -> Receiver:
    """A receiver that listens at ``bind``."""
    return ShmReceiver(bind, HostTarget(memory), config)


def shared_sender(memory: memoryview, config: TransportConfig, descriptor: int | None) -> Sender:
    """A sender of the memory that ``descriptor`` is of."""
    return ShmSender(SealedSource(memory, descriptor), config)


__all__ = ["ShmReceiver", "ShmSender", "receiver", "shared_sender", "why_unreachable"]
