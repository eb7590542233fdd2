"""What a worker tells routers of its prefix cache: which blocks came and went, by number, and all of them when asked.

::

    router -> worker    KVFollow                worker -> router    KVEvents, KVSnapshot

Blocks are told of by the keys of their hashes, one after the other. ``KVEvents`` carry consecutive numbers, so that a
lost one shows, and each heartbeat carries the number of the last, so that a lost last one shows as well.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

KEY_BYTES = 8
"""First bytes of a block's hash, its *key*: enough to tell a cluster's blocks apart where a mistake costs time only."""
MAX_KEYS = 1 << 15
"""Keys in one message at most, 256 KiB of them."""
MAX_PAGES = 1 << 12
"""Pages of one snapshot at most: a worker's pool may have 2**27 blocks."""

Keys = Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS * KEY_BYTES)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class KVFollow(msgspec.Struct, frozen=True, kw_only=True, tag="kv_follow"):
    """Router to worker: go on telling me, for a while.

    Attributes:
        sequence: of the last events that I have taken in; None asks for a snapshot.
    """

    sequence: Number | None = None


class KVEvents(msgspec.Struct, frozen=True, kw_only=True, tag="kv_events"):
    """Worker to router: the net change of its prefix cache since the events before; no key is in both.

    Attributes:
        sequence: counts from 1; the state before them is 0, an empty cache.
        stored, removed: keys of blocks that a prompt finds from now on, and of blocks that it does not find any more.
    """

    sequence: Number
    stored: Keys = b""
    removed: Keys = b""


class KVSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag="kv_snapshot"):
    """Worker to router: a part of everything in its prefix cache.

    Attributes:
        sequence: of the events that have led to it.
        page: counts from 0.
        last: whether none follows.
        keys: of the blocks.
    """

    sequence: Number
    page: Annotated[int, msgspec.Meta(ge=0, lt=MAX_PAGES)] = 0
    last: bool = True
    keys: Keys = b""
