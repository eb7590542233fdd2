"""The shim's functions as Python sees them.

Life cycle: a context is made, memory mapped in it, channels made and freed, memory unmapped, the context freed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

from kv_transfer.ucx import build, tuning
from protocol.errors import ChannelLost, ConfigError

IN_PROGRESS = 1
MAX_ADDRESS = 32768
MAX_REPORT = 1 << 18

HOST, CUDA = 0, 1
"""Kinds of memory, as UCX counts them."""

_POINTER = ctypes.c_void_p
_OUT = ctypes.POINTER(ctypes.c_void_p)
_ROOM = ctypes.POINTER(ctypes.c_size_t)
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "kvf_version": (ctypes.c_char_p, ()),
    "kvf_reason": (ctypes.c_char_p, (ctypes.c_int,)),
    "kvf_process_setting": (ctypes.c_int, (ctypes.c_char_p, ctypes.c_char_p)),
    "kvf_context_new": (ctypes.c_int, (ctypes.POINTER(ctypes.c_char_p), ctypes.c_size_t, _OUT)),
    "kvf_context_free": (None, (_POINTER,)),
    "kvf_describe": (ctypes.c_int, (_POINTER, _POINTER, ctypes.c_char_p, ctypes.c_size_t)),
    "kvf_memory_types": (ctypes.c_uint64, (_POINTER,)),
    "kvf_domains": (ctypes.c_int, (ctypes.c_char_p, ctypes.c_size_t)),
    "kvf_map": (ctypes.c_int, (_POINTER, _POINTER, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _OUT)),
    "kvf_unmap": (None, (_POINTER, _POINTER)),
    "kvf_channel_new": (ctypes.c_int, (_POINTER, ctypes.c_uint64, _OUT, ctypes.POINTER(ctypes.c_int))),
    "kvf_channel_address": (ctypes.c_int, (_POINTER, ctypes.c_char_p, _ROOM)),
    "kvf_connect": (ctypes.c_int, (_POINTER, ctypes.c_char_p)),
    "kvf_broken": (ctypes.c_int, (_POINTER,)),
    "kvf_move": (None, (_POINTER, _POINTER, ctypes.c_uint64, ctypes.c_int, _POINTER, ctypes.c_int, _POINTER)),
    "kvf_moved_bytes": (ctypes.c_uint64, (_POINTER,)),
    "kvf_moved": (ctypes.c_int, (_POINTER,)),
    "kvf_turn": (ctypes.c_int, (_POINTER, ctypes.c_double)),
    "kvf_close": (ctypes.c_int, (_POINTER,)),
    "kvf_channel_free": (None, (_POINTER,)),
}


class Library:
    """A loaded shim.

    Attributes:
        calls: its functions, by name; each gives up the interpreter's lock while it runs.
        source: which UCX it was built against, in words.
        version: of the UCX that is really loaded.

    Raises:
        ConfigError: it cannot be loaded.
    """

    def __init__(self, path: Path, source: str) -> None:
        try:
            self.calls = ctypes.CDLL(str(path))
        except OSError as error:
            raise ConfigError(f"the ucx transport's library does not load: {error}", field="transport") from error
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.calls, name)
            function.restype, function.argtypes = result, arguments
        self.source = source
        self.version: str = self.calls.kvf_version().decode()
        for name, value in tuning.process_settings().items():
            self.calls.kvf_process_setting(name.encode(), value.encode())

    def reason(self, status: int) -> str:
        """What a status means."""
        text: bytes = self.calls.kvf_reason(status)
        return text.decode(errors="replace")

    def check(self, status: int, doing: str) -> None:
        """Raise ChannelLost for a status that is an error."""
        if status < 0:
            raise ChannelLost(f"UCX {self.version}, {doing}: {self.reason(status)}")


@cache
def library() -> Library:
    """The shim of this process, built and loaded when first asked for.

    Raises:
        ConfigError: no UCX, no compiler, or they do not fit; says what is missing.
    """
    ucx = build.find_ucx()
    return Library(build.built(ucx), ucx.name)


class Context:
    """UCX opened for one memory.

    Args:
        address, length: of the memory, which the caller keeps alive.
        writable: whether it is received into; else it is sent from.
        tls: what UCX may go by; empty leaves it to UCX.
        kind: of memory.
        drain: waits until what UCX had queued on a device before its worker was destroyed is through.

    Attributes:
        handle, memory, kind, drain: for channels.

    Raises:
        ConfigError: UCX is not here, does not start, or cannot register the memory.
    """

    def __init__(
        self,
        address: int,
        length: int,
        *,
        writable: bool,
        tls: str = "",
        kind: int = HOST,
        drain: Callable[[], None] = lambda: None,
    ) -> None:
        self.library = library()
        self.kind = kind
        self.drain = drain
        calls = self.library.calls
        flat = [text.encode() for pair in tuning.settings(tls=tls).items() for text in pair]
        handle, memory = _POINTER(), _POINTER()
        self._configured(
            calls.kvf_context_new((ctypes.c_char_p * len(flat))(*flat), len(flat) // 2, ctypes.byref(handle)),
            "starting",
        )
        self.handle = handle
        status = calls.kvf_map(handle, address, length, int(writable), kind, ctypes.byref(memory))
        if status < 0:
            calls.kvf_context_free(handle)
        self._configured(status, f"registering {length} bytes")
        self.memory = memory

    def _configured(self, status: int, doing: str) -> None:
        if status < 0:
            text = f"UCX {self.library.version}, {doing}: {self.library.reason(status)}"
            raise ConfigError(text, field="transport")

    def moves(self, kind: int) -> bool:
        """Whether this UCX knows that kind of memory, and has found what it needs for it."""
        return bool(self.library.calls.kvf_memory_types(self.handle) >> kind & 1)

    def free(self) -> None:
        """Unmap the memory and end; every channel must be freed."""
        self.library.calls.kvf_unmap(self.handle, self.memory)
        self.library.calls.kvf_context_free(self.handle)
