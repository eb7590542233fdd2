"""A caller's memory: bytes, or where they are on a device."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a CUDA device, which belongs to the caller.

    Attributes:
        address: of the first byte, in the device's primary context.
        nbytes: its length.
        device: index among the devices that this process sees.

    Raises:
        ConfigError: a value is out of bounds; names the field and the value.
    """

    address: int
    nbytes: int
    device: int

    def __post_init__(self) -> None:
        for name, least in (("address", 1), ("nbytes", 1), ("device", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}", field=name)


def as_bytes(memory: memoryview, *, writable: bool) -> memoryview:
    """``memory`` as a flat view of bytes, sharing it.

    Raises:
        ConfigError: it is not C-contiguous, or is read-only where it must be written.
    """
    if not memory.c_contiguous:
        raise ConfigError("memory must be C-contiguous", field="memory")
    if writable and memory.readonly:
        raise ConfigError("memory must be writable, got a read-only view", field="memory")
    return memory.cast("B")
