"""KV from GPU to GPU of one host: the receiver copies straight out of the sender's pool, device to device.

It is the shared-memory transport (:mod:`kv_transfer.shm`) with another pool behind it: the same sockets, hello, frames
and ledger. In place of a memfd the handle of the pool's allocation travels, and the receiver copies by a stream of its
own. It waits for that before it leaves the ledger's entry, and its own gate; so a ship that is answered has been
copied, an entry without a lock is read by no copy of a process that lives, and a window that is closed is quiet.

* A receiver that dies with copies queued: its locks go with it, and its copies may go on for a moment until the driver
  has torn its context down. They only read, and what they write goes with the dead process.
* A sender that dies takes its memory with it. Its connection ends, and no ship of it lands that was not copied whole.
* CUDA knows no read-only handle. Whoever is given one, a process of the same user that has proved that it knows the
  cluster's secret, could write the pool's allocation.
* There are no checksums: the bytes never pass a CPU.
"""

from __future__ import annotations

from kv_transfer.cuda_ipc.driver import Driver
from kv_transfer.cuda_ipc.source import DeviceSource
from kv_transfer.cuda_ipc.target import DeviceTarget
from kv_transfer.memory import DeviceMemory
from kv_transfer.shm.endpoint import name_of, why_unreachable
from kv_transfer.shm.receiver import ShmReceiver
from kv_transfer.shm.sender import ShmSender
from kv_transfer.transport import Receiver, Sender, TransportConfig
from protocol.errors import ConfigError, KVFerryError


def receiver(bind: str, memory: memoryview | DeviceMemory, config: TransportConfig) -> Receiver:
    """A receiver that listens at ``bind``."""
    name_of(bind, "cuda_ipc")
    target = DeviceTarget(_checked(memory, config))
    try:
        return ShmReceiver(bind, target, config)
    except BaseException:
        target.close()
        raise


def sender(memory: memoryview | DeviceMemory, config: TransportConfig) -> Sender:
    """A sender; it needs no address of its own."""
    return ShmSender(DeviceSource(_checked(memory, config)), config)


def describe() -> str:
    """Whether there are GPUs for it, in one line. Never raises."""
    reason = why_unusable()
    return f"cuda_ipc: {reason}" if reason else f"cuda_ipc: {Driver().count()} CUDA devices, from pool to pool"


def why_unusable() -> str | None:
    """Why it cannot be used here; None when it can."""
    try:
        return None if Driver().count() else "cuda_ipc needs a GPU: the driver finds none"
    except KVFerryError as error:
        return error.message


def _checked(memory: memoryview | DeviceMemory, config: TransportConfig) -> DeviceMemory:
    if not isinstance(memory, DeviceMemory):
        raise ConfigError(
            why_unusable() or "cuda_ipc needs a pool on a GPU, this one is in host memory", field="memory"
        )
    if config.checksum:
        raise ConfigError("cuda_ipc has no checksums: the bytes never pass a CPU", field="checksum")
    return memory


__all__ = ["describe", "receiver", "sender", "why_unreachable", "why_unusable"]
