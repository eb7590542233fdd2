"""The byte view of a caller's memory."""

from __future__ import annotations

from protocol.errors import ConfigError


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
