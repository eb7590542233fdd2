"""What a sender lets receivers read, and how it passes them access to it."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence

from kv_transfer.memory import as_bytes
from kv_transfer.shm import sealed, wire
from kv_transfer.span import Span
from protocol.errors import ConfigError, IntegrityMismatch, KVFerryError, MalformedFrame


class Source(ABC):
    """Memory that receivers read for themselves.

    Life cycle: made, closed once.

    Attributes:
        scheme: of the addresses that it is shipped to.
        versions: of the wire, the lowest and the highest.
        nbytes: its length.
        refusal: what a receiver means that turns the offer away.
    """

    scheme: str
    versions: tuple[int, int]
    nbytes: int
    refusal: type[KVFerryError]

    @abstractmethod
    def offer(self) -> tuple[bytes, list[int]]:
        """What gives a receiver access: a message, and descriptors that the caller closes.

        Raises:
            ConfigError: the system does not let us.
        """

    @abstractmethod
    def views(self, spans: Sequence[Span]) -> list[memoryview]:
        """The bytes of ``spans``, for their checksum."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the memory."""


class SealedSource(Source):
    """A sealed memfd: receivers map it.

    Args:
        memory: what is read.
        descriptor: of the memfd that ``memory`` is the whole of; a copy is kept until closed.

    Raises:
        ConfigError: there is no descriptor, or it is not one of sealed memory of that length.
    """

    scheme = "shm"
    versions = (wire.LOWEST_VERSION, wire.HIGHEST_VERSION)
    refusal = MalformedFrame

    def __init__(self, memory: memoryview, descriptor: int | None) -> None:
        self._memory = as_bytes(memory, writable=False)
        self.nbytes = self._memory.nbytes
        if descriptor is None or not sys.platform.startswith("linux"):
            raise ConfigError("the shm transport needs Linux, and a pool in shared memory", field="memory")
        try:
            sealed.check(descriptor, self.nbytes)
        except IntegrityMismatch as error:
            raise ConfigError(error.message, field="memory") from error
        self._descriptor = os.dup(descriptor)

    def offer(self) -> tuple[bytes, list[int]]:
        """See :meth:`Source.offer`: the descriptor has an open file description of its own, which cannot write."""
        return wire.pack_offer(self.nbytes), [sealed.reopen(self._descriptor, writable=False)]

    def views(self, spans: Sequence[Span]) -> list[memoryview]:
        """See :meth:`Source.views`."""
        return [self._memory[span.source : span.source + span.nbytes] for span in spans]

    def close(self) -> None:
        """See :meth:`Source.close`."""
        self._memory = memoryview(b"")
        os.close(self._descriptor)
