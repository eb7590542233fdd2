"""A receiver's pool on a GPU, and the copies into it from a sender's."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from kv_transfer.checksum import Checksum
from kv_transfer.cuda_ipc import wire
from kv_transfer.cuda_ipc.driver import Device, Driver, Stream
from kv_transfer.memory import DeviceMemory
from kv_transfer.shm.copying import Copier, Run
from kv_transfer.shm.endpoint import check_user
from kv_transfer.shm.target import Target
from protocol.errors import ChannelLost, ConfigError

BATCH_BYTES = 64 << 20
"""A few milliseconds over PCIe, and far more than it costs to wait for the device and to take a lock."""


class DeviceTarget(Target):
    """Memory of a CUDA device.

    Args:
        memory: what is written. It must not be freed before the target is closed.

    Raises:
        ConfigError: there is no driver, or no such device.
    """

    scheme = "cuda_ipc"
    versions = (wire.LOWEST_VERSION, wire.HIGHEST_VERSION)
    offer_bytes = wire.OFFER.size
    offer_descriptors = 0

    def __init__(self, memory: DeviceMemory) -> None:
        self.nbytes = memory.nbytes
        self._address = memory.address
        self._device = Device(Driver(), memory.device)

    def attach(self, offer: bytes, descriptors: Sequence[int], connection: socket.socket) -> Copier:
        """See :meth:`Target.attach`."""
        found = wire.parse_offer(offer)
        reason = self._device.why_no_access(found.uuid)
        if reason is not None:
            raise ConfigError(reason, field="transport")
        # No process can open a handle of its own. The kernel says who is there: an address is believed of nobody else.
        own = check_user(connection) == os.getpid()
        return DeviceCopier(self._device, found, self._address, own=own)

    def close(self) -> None:
        """See :meth:`Target.close`."""
        self._device.close()


class DeviceCopier(Copier):
    """Copies between devices by a stream of its own; waits for it after each batch, so what was copied is there.

    Args:
        device: that is written.
        offer: of what is read.
        target: address of what is written.
        own: whether the sender is this process.

    Raises:
        ChannelLost: the sender's memory cannot be read from here.
    """

    batch_bytes = BATCH_BYTES

    def __init__(self, device: Device, offer: wire.Offer, target: int, *, own: bool) -> None:
        self.nbytes = offer.nbytes
        self._target = target
        with ExitStack() as stack:
            # For as long as it lives: a copier has a thread of its own.
            stack.enter_context(device.current())
            self._source = offer.address
            if not own:
                base = device.open(offer.handle)
                stack.callback(device.driver.call, "cuIpcCloseMemHandle", base)
                self._source = base + offer.offset
            self._stream = Stream(device.driver)
            stack.callback(self._stream.close)
            self._stack = stack.pop_all()

    def copy(self, batch: Sequence[Run], *, summed: bool = False) -> None:
        """See :meth:`Copier.copy`."""
        try:
            for source, target, nbytes in batch:
                self._stream.copy(self._source + source, self._target + target, nbytes)
        finally:
            self._stream.wait()

    def sum(self, batch: Sequence[Run], checksum: Checksum) -> None:
        """Never comes to it: a receiver that wants checksums is refused when it is made, and no sender makes any."""
        raise ChannelLost("memory of a device is not summed")

    def release(self) -> None:
        """See :meth:`Copier.release`."""
        with suppress(ChannelLost):  # of a device that has failed nothing is left to be given back
            self._stack.close()
