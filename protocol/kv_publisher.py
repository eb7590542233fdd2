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

Changes = tuple[list[BlockHash], list[BlockHash]]


class KVPublisher:
    """What one worker tells of its prefix cache.

    Args:
        changes: takes away what was stored and what was removed since it was last called.
        everything: gives all hashes that are there.

    Attributes:
        sequence: of the last events.
    """

    def __init__(self, changes: Callable[[], Changes], everything: Callable[[], Iterable[BlockHash]]) -> None:
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
            events.append(
                KVEvents(sequence=self.sequence, stored=_keys(stored[:MAX_KEYS]), removed=_keys(removed[:MAX_KEYS]))
            )
            stored, removed = stored[MAX_KEYS:], removed[MAX_KEYS:]
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
        keys = _keys(self._everything())[: MAX_PAGES * MAX_KEYS * KEY_BYTES]
        size = MAX_KEYS * KEY_BYTES
        pages = [keys[start : start + size] for start in range(0, len(keys), size)] or [b""]
        return [
            KVSnapshot(sequence=self.sequence, page=page, last=page == len(pages) - 1, keys=part)
            for page, part in enumerate(pages)
        ]

    def forget(self, follower: Hashable) -> None:
        """A router is gone."""
        self._followers.pop(follower, None)


def _keys(hashes: Iterable[BlockHash]) -> bytes:
    return b"".join(block_hash[:KEY_BYTES] for block_hash in hashes)
