"""What the measuring process tells the decode side, a line of JSON each on its standard input, and hears from it."""

from __future__ import annotations

import msgspec

from protocol.ids import Peer, RequestKey
from protocol.layout import KVLayout
from protocol.messages import Reserve

LINE_BYTES = 32 << 20
TOKEN = 1
"""All that is ever said."""


class Stage(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Make a pool and listen. Answered by :class:`Ready`.

    Attributes:
        scheme: of the transport.
        ucx_tls: what UCX is held to; empty where it is not.
        layout: of the pool.
        blocks: of the pool.
    """

    scheme: str
    ucx_tls: str
    layout: KVLayout
    blocks: int


class Take(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Take a request over, as a router says it. Answered by :class:`Taken`.

    Attributes:
        reserve: the request.
        checked: whether the answer is to have the checksum of what landed.
    """

    reserve: Reserve
    checked: bool


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """It listens, as ``me``."""

    me: Peer


class Taken(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The import is committed.

    Attributes:
        key: of the request.
        at: when, in monotonic seconds.
        crc: CRC-32 of its blocks in order, where it was asked for.
    """

    key: RequestKey
    at: float
    crc: int | None


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """It could not be done: an error by its code."""

    code: str
    text: str


Order = Stage | Take
Answer = Ready | Taken | Failed
