"""What became findable in a prefix index, and what is not any more, in the net.

Life cycle of a change: noted, taken back by its opposite, or taken away by :meth:`PrefixChanges.take`.
"""

from __future__ import annotations

from protocol.block_hashes import BlockHash
from protocol.kv_publisher import keys_of


class PrefixChanges:
    """Net changes since the last :meth:`take`: at most one for each hash that was, or is, in the index."""

    def __init__(self) -> None:
        self._stored: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}

    def stored(self, block_hash: BlockHash) -> None:
        """A block became findable."""
        if block_hash in self._removed:
            del self._removed[block_hash]
        else:
            self._stored[block_hash] = None

    def removed(self, block_hash: BlockHash) -> None:
        """A block is no more."""
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._removed[block_hash] = None

    def take(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """``(stored, removed)`` since the last call."""
        taken = list(self._stored), list(self._removed)
        self._stored, self._removed = {}, {}
        return taken

    def take_keys(self) -> tuple[bytes, bytes]:
        """The same as keys."""
        stored, removed = self.take()
        return keys_of(stored), keys_of(removed)
