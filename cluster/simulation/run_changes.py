"""What became findable in a simulated worker's cache, and what is not any more, in the net: as the engine tells it.

Life cycle of a change: noted with the keys of a run, and taken away with all others. Where some keys may have come and
gone in the meantime, and only there, they are looked at one by one.
"""

from __future__ import annotations

from engine.prefix_changes import PrefixChanges
from protocol.kv_events import KEY_BYTES


class RunChanges:
    """Net changes since the last :meth:`take`.

    Attributes:
        taken: how often they were taken.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._noted: list[tuple[bytes, bool]] = []
        self._gone: set[bytes] = set()
        self._twice = False

    def stored(self, keys: bytes) -> None:
        """Blocks became findable."""
        # Who is cached has all before it cached, so the first of what comes again is the first of what went.
        if self._gone and keys[:KEY_BYTES] in self._gone:
            self._twice = True
        self._noted.append((keys, True))

    def removed(self, keys: bytes, *, recent: bool) -> None:
        """Blocks are no more; ``recent`` where they became findable since the last :meth:`take`."""
        self._twice |= recent
        self._gone.add(keys[:KEY_BYTES])
        self._noted.append((keys, False))

    def take(self) -> tuple[bytes, bytes]:
        """Keys ``(stored, removed)`` since the last call."""
        noted, self._noted = self._noted, []
        twice, self._twice = self._twice, False
        self._gone.clear()
        self.taken += 1
        if not twice:
            return b"".join([keys for keys, came in noted if came]), b"".join(
                [keys for keys, came in noted if not came]
            )
        changes = PrefixChanges()
        for keys, came in noted:
            for place in range(0, len(keys), KEY_BYTES):
                (changes.stored if came else changes.removed)(keys[place : place + KEY_BYTES])
        return changes.take_keys()
