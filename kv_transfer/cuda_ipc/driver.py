"""The calls of NVIDIA's driver that transports need, by ctypes: libcuda alone, neither its runtime nor torch.

Contexts are the devices' primary ones, which torch uses as well: a pool's address is valid in them. A thread has a
context while it is within :meth:`Device.current`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from protocol.errors import ChannelLost, ConfigError

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
UUID_BYTES = 16
LAZY_PEER_ACCESS = 1
"""``CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS``."""
NON_BLOCKING = 1
"""``CU_STREAM_NON_BLOCKING``: does not wait for the legacy default stream, on which the engine computes."""

OWNER = 100
"""``CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER``, and the ordering of writes that makes that flush needless."""
CURRENT_CONTEXT = 0
"""``CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX``."""

_Pointer = ctypes.c_uint64
_Opaque = ctypes.c_void_p


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class _Uuid(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * UUID_BYTES)]


_SIGNATURES: dict[str, tuple[object, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuDeviceGetCount": (ctypes.POINTER(ctypes.c_int),),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDeviceGetUuid": (ctypes.POINTER(_Uuid), ctypes.c_int),
    "cuDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cuDeviceCanAccessPeer": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_Opaque), ctypes.c_int),
    "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
    "cuCtxPushCurrent_v2": (_Opaque,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(_Opaque),),
    "cuCtxSynchronize": (),
    "cuFlushGPUDirectRDMAWrites": (ctypes.c_int, ctypes.c_int),
    "cuMemGetAddressRange_v2": (ctypes.POINTER(_Pointer), ctypes.POINTER(ctypes.c_size_t), _Pointer),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), _Pointer),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_Pointer), _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_Pointer,),
    "cuStreamCreate": (ctypes.POINTER(_Opaque), ctypes.c_uint),
    "cuStreamSynchronize": (_Opaque,),
    "cuStreamDestroy_v2": (_Opaque,),
    "cuMemcpyAsync": (_Pointer, _Pointer, ctypes.c_size_t, _Opaque),
}


class Attribute(IntEnum):
    """What a device says of itself, by the driver's numbers (``CU_DEVICE_ATTRIBUTE_...``)."""

    RDMA = 116
    """``GPU_DIRECT_RDMA_SUPPORTED``."""
    RDMA_FLUSHES = 117
    """``GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS``: bit 0, the host can ask for one."""
    RDMA_ORDERING = 118
    """``GPU_DIRECT_RDMA_WRITES_ORDERING``: from OWNER on no flush is needed."""
    DMABUF = 124
    """``DMA_BUF_SUPPORTED``."""


class Driver:
    """The loaded library.

    Raises:
        ConfigError: it is not here, or finds no device.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
            for name, arguments in _SIGNATURES.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, ctypes.c_int
        except (OSError, AttributeError) as error:
            raise ConfigError(f"cuda_ipc needs NVIDIA's driver: {error}", field="transport") from error
        try:
            self.call("cuInit", 0)
        except ChannelLost as error:
            raise ConfigError(f"cuda_ipc needs a GPU: {error.message}", field="transport") from error

    def call(self, name: str, *arguments: object) -> None:
        """Call a function.

        Raises:
            ChannelLost: it failed; names it and the driver's reason.
        """
        code = getattr(self._library, name)(*arguments)
        if code:
            words = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(words))
            raise ChannelLost(f"{name}: {(words.value or b'unknown error').decode(errors='replace')} ({code})")

    def count(self) -> int:
        """Devices that this process sees."""
        found = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(found))
        return found.value


class Device:
    """One device and its primary context. Life cycle: made, closed once.

    Args:
        driver: loaded.
        index: as torch counts.

    Raises:
        ConfigError: there is no such device, or no context can be made.
    """

    def __init__(self, driver: Driver, index: int) -> None:
        self.driver = driver
        self._context = _Opaque()
        number = ctypes.c_int()
        try:
            driver.call("cuDeviceGet", ctypes.byref(number), index)
            self._number = number.value
            driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._number)
        except ChannelLost as error:
            raise ConfigError(f"CUDA device {index} cannot be used: {error.message}", field="memory") from error

    @property
    def uuid(self) -> bytes:
        """The same for every process that sees the device."""
        found = _Uuid()
        self.driver.call("cuDeviceGetUuid", ctypes.byref(found), self._number)
        return ctypes.string_at(ctypes.byref(found), UUID_BYTES)

    def attribute(self, name: Attribute) -> int:
        """What the device says of itself; 0 where the driver does not know the question."""
        found = ctypes.c_int()
        try:
            self.driver.call("cuDeviceGetAttribute", ctypes.byref(found), name, self._number)
        except ChannelLost:
            return 0
        return found.value

    def why_no_access(self, uuid: bytes) -> str | None:
        """Why this device cannot read the memory of another; None when it can, or when only trying will tell.

        A process may not see the other's device, and can read its memory all the same.
        """
        for index in range(self.driver.count()):
            number, found, able = ctypes.c_int(), _Uuid(), ctypes.c_int()
            self.driver.call("cuDeviceGet", ctypes.byref(number), index)
            self.driver.call("cuDeviceGetUuid", ctypes.byref(found), number)
            if ctypes.string_at(ctypes.byref(found), UUID_BYTES) != uuid or number.value == self._number:
                continue
            self.driver.call("cuDeviceCanAccessPeer", ctypes.byref(able), self._number, number)
            return None if able.value else "no peer access between the two GPUs"
        return None

    def enter(self) -> None:
        """The calling thread works with this device from now on, to its end.

        Raises:
            ChannelLost: the device has failed.
        """
        self.driver.call("cuCtxPushCurrent_v2", self._context)

    @contextmanager
    def current(self) -> Iterator[None]:
        """The calling thread works with this device, and with what it had before afterwards.

        Raises:
            ChannelLost: the device has failed.
        """
        self.driver.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.driver.call("cuCtxPopCurrent_v2", ctypes.byref(_Opaque()))

    def flush_rdma_writes(self) -> None:
        """Return when what RDMA has written is seen by every kernel from now on. Within :meth:`current`.

        Raises:
            ChannelLost: the device has failed.
        """
        self.driver.call("cuFlushGPUDirectRDMAWrites", CURRENT_CONTEXT, OWNER)

    def drain(self) -> None:
        """Return when nothing is queued on the device in this process any more, by whomever. Within :meth:`current`.

        Raises:
            ChannelLost: the device has failed, after which it copies nothing.
        """
        self.driver.call("cuCtxSynchronize")

    def export(self, address: int) -> tuple[bytes, int, int]:
        """``(handle, offset, bytes)`` of the allocation that ``address`` lies in, and the address's place in it.

        Raises:
            ChannelLost: it cannot be shared.
        """
        base, size, handle = _Pointer(), ctypes.c_size_t(), _Handle()
        with self.current():
            self.driver.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
            self.driver.call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES), address - base.value, size.value

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; its address here. The thread is within :meth:`current`.

        Raises:
            ChannelLost: it cannot be read from here.
        """
        found = _Pointer()
        wanted = _Handle.from_buffer_copy(handle)
        self.driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(found), wanted, LAZY_PEER_ACCESS)
        return found.value

    def close(self) -> None:
        """Let go of the context."""
        self.driver.call("cuDevicePrimaryCtxRelease_v2", self._number)


class Stream:
    """A queue of copies; within :meth:`Device.current` alone. Life cycle: made, closed once.

    Raises:
        ChannelLost: the device has failed.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._stream = _Opaque()
        driver.call("cuStreamCreate", ctypes.byref(self._stream), NON_BLOCKING)

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Queue a copy between addresses of any devices.

        Raises:
            ChannelLost: it was not queued.
        """
        self._driver.call("cuMemcpyAsync", target, source, nbytes, self._stream)

    def wait(self) -> None:
        """Return when nothing is queued any more.

        Raises:
            ChannelLost: the device has failed, after which it copies nothing.
        """
        self._driver.call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        """Give it back."""
        self._driver.call("cuStreamDestroy_v2", self._stream)
