"""A worker's side of the KV events: numbers its changes, and knows which routers follow them. Decides only.

Life cycle of a follower: its first :class:`~protocol.kv_events.KVFollow` is answered with a snapshot, after which it is
sent each change; it stays one for ``FOLLOW_TTL`` seconds after each further :class:`~protocol.kv_events.KVFollow`. So
nothing piles up for a router that is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from protocol.block_hashes import BlockHash
from protocol.kv_events import KEY_BYTES, MAX_KEYS, MAX_PAGES, KVEvents, KVFollow, KVSnapshot

FOLLOW_TTL = 15.0
"""Seconds for which a router is told of changes without asking again."""

Changes = tuple[bytes, bytes]
_PART = MAX_KEYS * KEY_BYTES


def keys_of(hashes: Iterable[BlockHash]) -> bytes:
    """The keys of blocks, one after the other."""
    return b"".join([block_hash[:KEY_BYTES] for block_hash in hashes])


class KVPublisher:
    """What one worker tells of its prefix cache.

    Args:
        changes: takes away the keys of what was stored and of what was removed since it was last called.
        everything: gives all keys that are there.

    Attributes:
        sequence: of the last events.
    """

    def __init__(self, changes: Callable[[], Changes], everything: Callable[[], bytes]) -> None:
        self.sequence = 0
        self._changes = changes
        self._everything = everything
        self._followers: dict[Hashable, float] = {}

    def flush(self) -> list[KVEvents]:
        """What has changed since the last call, in order."""
        stored, removed = self._changes()
        events = []
        while stored or removed:
            self.sequence += 1
            events.append(KVEvents(sequence=self.sequence, stored=stored[:_PART], removed=removed[:_PART]))
            stored, removed = stored[_PART:], removed[_PART:]
        return events

    def followers(self, now: float) -> list[Hashable]:
        """Who is to be sent the events."""
        for follower in [follower for follower, until in self._followers.items() if until <= now]:
            del self._followers[follower]
        return list(self._followers)

    def follow(self, follower: Hashable, asked: KVFollow, now: float) -> list[KVSnapshot]:
        """A router wants to be told; :meth:`flush` must have been called just before.

        Returns:
            What it is to be sent at once, before any events.
        """
        known = self._followers.get(follower, now) > now
        self._followers[follower] = now + FOLLOW_TTL
        if asked.sequence is not None and (known or asked.sequence == self.sequence):
            return []
        keys = self._everything()[: MAX_PAGES * _PART]
        pages = [keys[start : start + _PART] for start in range(0, len(keys), _PART)] or [b""]
        return [
            KVSnapshot(sequence=self.sequence, page=page, last=page == len(pages) - 1, keys=part)
            for page, part in enumerate(pages)
        ]

    def forget(self, follower: Hashable) -> None:
        """A router is gone."""
        self._followers.pop(follower, None)
