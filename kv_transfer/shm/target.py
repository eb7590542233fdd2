"""What a receiver writes, and how it comes to read a sender's memory."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence

from kv_transfer.memory import as_bytes
from kv_transfer.shm import sealed, wire
from kv_transfer.shm.copying import Copier, HostCopier


class Target(ABC):
    """The memory of a receiver.

    Attributes:
        scheme: of the receiver's address.
        versions: of the wire, the lowest and the highest.
        nbytes: its length.
        offer_bytes: length of a sender's offer.
        offer_descriptors: that come with it, without the ledger's.
    """

    scheme: str
    versions: tuple[int, int]
    nbytes: int
    offer_bytes: int
    offer_descriptors: int

    @abstractmethod
    def attach(self, offer: bytes, descriptors: Sequence[int], connection: socket.socket) -> Copier:
        """Copies from the memory that a sender offers to this one; for the calling thread alone.

        Args:
            offer: as it came.
            descriptors: likewise; the caller closes them.
            connection: that they came by.

        Raises:
            KVFerryError: it will not do, or cannot be read from here; says why.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the memory."""


class HostTarget(Target):
    """Host memory.

    Args:
        memory: writable; it need not be shared itself.

    Raises:
        ConfigError: it cannot be written.
    """

    scheme = "shm"
    versions = (wire.LOWEST_VERSION, wire.HIGHEST_VERSION)
    offer_bytes = wire.OFFER.size
    offer_descriptors = 1

    def __init__(self, memory: memoryview) -> None:
        self._memory = as_bytes(memory, writable=True)
        self.nbytes = self._memory.nbytes

    def attach(self, offer: bytes, descriptors: Sequence[int], connection: socket.socket) -> Copier:
        """See :meth:`Target.attach`."""
        return HostCopier(sealed.attach(descriptors[0], wire.parse_offer(offer), writable=False), self._memory)

    def close(self) -> None:
        """See :meth:`Target.close`."""
        self._memory = memoryview(b"")
