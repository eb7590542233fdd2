"""Full blocks by the hash of everything up to and including them, and which of them may be evicted first.

Life cycle of an entry in :class:`PrefixIndex`: inserted when its block is full, parked while nobody holds the block,
unparked by a hit, forgotten when the block is evicted.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.prefix_changes import PrefixChanges
from protocol.block_hashes import HASH_BYTES, BlockHash, block_hashes, extend, root_hash
from protocol.errors import InvariantViolation

__all__ = ["HASH_BYTES", "BlockHash", "PrefixIndex", "block_hashes", "extend", "root_hash"]


class PrefixIndex:
    """Which block holds which prefix, and the parked ones in the order they may be evicted."""

    def __init__(self) -> None:
        self._changes: PrefixChanges | None = None
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._parked: dict[int, None] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    def __len__(self) -> int:
        return len(self._hash_of)

    @property
    def parked(self) -> int:
        """How many blocks may be evicted."""
        return len(self._parked)

    def insert(self, block: int, block_hash: BlockHash) -> bool:
        """Make ``block`` findable; False when another block already stands for this hash, and keeps it.

        Raises:
            InvariantViolation: ``block`` is already known under another hash.
        """
        known = self._hash_of.get(block)
        if known is not None:
            if known != block_hash:
                raise InvariantViolation(
                    f"block {block} is sealed as {known.hex()} and cannot become {block_hash.hex()}"
                )
            return True
        if self._block_of.setdefault(block_hash, block) != block:
            return False
        self._hash_of[block] = block_hash
        if self._changes is not None:
            self._changes.stored(block_hash)
        return True

    def find(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Blocks of the longest known prefix of the chain ``hashes``."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def park(self, block: int) -> None:
        """Nobody holds ``block`` any more; it goes to the end of the line."""
        assert block in self._hash_of, f"block {block} is not indexed"
        assert block not in self._parked, f"block {block} is already parked"
        self._parked[block] = None

    def unpark(self, block: int) -> None:
        """Somebody holds ``block`` again."""
        del self._parked[block]

    def evict(self) -> int:
        """Forget the block that was parked first, and return it."""
        block = next(iter(self._parked))
        del self._parked[block]
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        if self._changes is not None:
            self._changes.removed(block_hash)
        return block

    def watch(self) -> PrefixChanges:
        """Note from now on what becomes findable and what is no more; what is there already counts as stored."""
        self._changes = PrefixChanges()
        for block_hash in self._block_of:
            self._changes.stored(block_hash)
        return self._changes

    def hashes(self) -> Iterable[BlockHash]:
        """Every hash that finds a block."""
        return self._block_of.keys()

    def check_integrity(self) -> None:
        """Check that the maps agree.

        Raises:
            InvariantViolation: names the block.
        """
        for block, block_hash in self._hash_of.items():
            if self._block_of.get(block_hash) != block:
                raise InvariantViolation(f"block {block} is sealed as {block_hash.hex()}, but that finds another block")
        if len(self._block_of) != len(self._hash_of):
            lost = sorted(set(self._block_of.values()) - set(self._hash_of))
            raise InvariantViolation(f"blocks {lost} are found by a hash, but have none")
        for block in self._parked:
            if block not in self._hash_of:
                raise InvariantViolation(f"block {block} is parked, but has no hash")

    def is_parked(self, block: int) -> bool:
        """Whether ``block`` may be evicted."""
        return block in self._parked
