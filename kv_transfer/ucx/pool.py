"""The caller's memory as UCX moves it: in host memory, or on a GPU that RDMA reaches.

Life cycle: made -> opened in a context -> entered by the thread that drives UCX -> closed, once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress

import numpy as np

from kv_transfer.cuda_ipc.driver import OWNER, Attribute, Device, Driver
from kv_transfer.memory import DeviceMemory, as_bytes
from kv_transfer.ucx import tuning
from kv_transfer.ucx.library import CUDA, Context
from protocol.errors import ChannelLost, InvariantViolation


class Pool(ABC):
    """See the module.

    Attributes:
        address: of the first byte.
        nbytes: length.
    """

    address: int
    nbytes: int

    @abstractmethod
    def context(self, tls: str) -> Context:
        """UCX opened for it.

        Args:
            tls: what UCX may go by; empty leaves it to UCX.

        Raises:
            ConfigError: UCX is not here, does not start, or cannot register the memory.
        """

    @abstractmethod
    def enter(self) -> None:
        """The calling thread will drive UCX with it, to its end."""

    @abstractmethod
    def views(self, spans: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
        """The bytes of ``(offset, bytes)`` each."""

    @abstractmethod
    def arrived(self) -> None:
        """Something was received whole: return when whoever reads it from now on sees it.

        Raises:
            ChannelLost: that cannot be had.
        """

    @abstractmethod
    def close(self, context: Context | None = None) -> None:
        """Let go of it, and first free the context that it was opened in."""


class HostPool(Pool):
    """Host memory.

    Args:
        memory: the caller keeps it.
        writable: whether it is received into; else it is sent from.

    Raises:
        ConfigError: it is not contiguous, or not writable where it must be.
    """

    def __init__(self, memory: memoryview, *, writable: bool) -> None:
        self._memory = as_bytes(memory, writable=writable)
        self._writable = writable
        self.address, self.nbytes = np.frombuffer(self._memory, np.uint8).ctypes.data, self._memory.nbytes

    def context(self, tls: str) -> Context:
        """See :meth:`Pool.context`."""
        return Context(self.address, self.nbytes, writable=self._writable, tls=tls)

    def enter(self) -> None:
        """See :meth:`Pool.enter`."""

    def views(self, spans: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
        """See :meth:`Pool.views`."""
        return (self._memory[offset : offset + nbytes] for offset, nbytes in spans)

    def arrived(self) -> None:
        """See :meth:`Pool.arrived`."""

    def close(self, context: Context | None = None) -> None:
        """See :meth:`Pool.close`."""
        if context is not None:
            context.free()
        # Named here, for who served a channel may live on in some traceback.
        self._memory.release()


class GpuPool(Pool):
    """Memory of a CUDA device, which an RDMA device reads and writes without the host.

    Args:
        memory: it must not be freed before the pool is closed.
        writable: whether it is received into; else it is sent from.

    Raises:
        ConfigError: there is no driver, or no such device.
    """

    kind = CUDA

    def __init__(self, memory: DeviceMemory, *, writable: bool) -> None:
        self.address, self.nbytes = memory.address, memory.nbytes
        self._writable = writable
        self._device = Device(Driver(), memory.device)
        self._flushes = self._device.attribute(Attribute.RDMA_ORDERING) < OWNER

    def context(self, tls: str) -> Context:
        """See :meth:`Pool.context`."""
        with self._device.current():
            tls = tuning.without_peer_copies(tls)
            return Context(
                self.address, self.nbytes, writable=self._writable, tls=tls, kind=self.kind, drain=self._drain
            )

    def enter(self) -> None:
        """See :meth:`Pool.enter`: UCX asks which device is the calling thread's."""
        self._device.enter()

    def views(self, spans: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
        """Nobody asks for them: with checksums a device's memory is not moved by UCX."""
        raise InvariantViolation("memory of a device has no bytes to look at")

    def arrived(self) -> None:
        """See :meth:`Pool.arrived`: what RDMA writes may pass what it wrote before, on its way to the GPU's memory."""
        if self._flushes:
            self._device.flush_rdma_writes()

    def _drain(self) -> None:
        # Small pieces go by copies of UCX's own, on streams that its worker takes with it, but does not wait for.
        with suppress(ChannelLost):  # a device that has failed copies nothing
            self._device.drain()

    def close(self, context: Context | None = None) -> None:
        """See :meth:`Pool.close`."""
        if context is not None:
            with self._device.current():
                context.free()
        self._device.close()
