"""A sender's pool on a GPU, and the handle by which other processes read it."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.cuda_ipc import wire
from kv_transfer.cuda_ipc.driver import Device, Driver
from kv_transfer.memory import DeviceMemory
from kv_transfer.shm.source import Source
from kv_transfer.span import Span
from protocol.errors import ChannelLost, ConfigError, InvariantViolation, TransportRefused


class DeviceSource(Source):
    """Memory of a CUDA device.

    Args:
        memory: what is read. It must not be freed before the source is closed.

    Raises:
        ConfigError: there is no driver, or the memory cannot be shared.
    """

    scheme = "cuda_ipc"
    versions = (wire.LOWEST_VERSION, wire.HIGHEST_VERSION)
    refusal = TransportRefused

    def __init__(self, memory: DeviceMemory) -> None:
        self.nbytes = memory.nbytes
        self._device = Device(Driver(), memory.device)
        try:
            handle, offset, allocation = self._device.export(memory.address)
            uuid = self._device.uuid
        except ChannelLost as error:
            self._device.close()
            raise ConfigError(
                f"the pool cannot be shared between processes: {error.message}", field="memory"
            ) from error
        self._offer = wire.Offer(self.nbytes, allocation, offset, memory.address, uuid, handle)

    def offer(self) -> tuple[bytes, list[int]]:
        """See :meth:`Source.offer`."""
        return self._offer.pack(), []

    def views(self, spans: Sequence[Span]) -> list[memoryview]:
        """Nobody asks for them: a sender with checksums is refused when it is made."""
        raise InvariantViolation("memory of a device has no bytes to look at")

    def close(self) -> None:
        """See :meth:`Source.close`."""
        self._device.close()
