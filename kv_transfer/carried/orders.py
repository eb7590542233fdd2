"""Bytes between a worker and its carrier, on a socket pair, big-endian.

::

    order     to the carrier     kind, slot, length; with CONNECT that many bytes follow: a key, as long as the slot's
                                 number says, and the peer's introduction
    report    to the worker      kind, slot, length; with INTRODUCED and FAILED that many bytes follow
"""

from __future__ import annotations

import struct
from enum import IntEnum

ORDER = struct.Struct("!BBI")
MAX_INTRODUCTION = 64 << 10
MAX_REASON = 1 << 10


class Order(IntEnum):
    """What a carrier is told.

    CONNECT: to the peer that is introduced. MOVE: send, or receive, that many bytes of a slot. FREE: the slot has been
    read at the other end.
    """

    CONNECT = 1
    MOVE = 2
    FREE = 3


class Report(IntEnum):
    """What a carrier tells.

    INTRODUCED: this is what the peer must know. CONNECTED. MOVED: a slot. FAILED: why; it ends.
    """

    INTRODUCED = 1
    CONNECTED = 2
    MOVED = 3
    FAILED = 4
