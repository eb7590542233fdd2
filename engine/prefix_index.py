"""Full blocks by the hash of everything up to and including them, and which of them may be evicted first.

The hash of a block is BLAKE2b over its parent's hash and its token ids, so one hash names a whole prefix, as in the
prefix caching of vLLM. It depends on nothing but the salt, the token ids and the block size: two processes, on any two
hosts and over restarts, give the same value.

Life cycle of an entry in :class:`PrefixIndex`: inserted when its block is full, parked while nobody holds the block,
unparked by a hit, forgotten when the block is evicted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from protocol.errors import ConfigError, InvariantViolation

BlockHash = bytes
"""Sixteen bytes that name a block and the whole prefix before it."""

HASH_BYTES = 16
_ROOT = b"kvferry.root.v1"
_BLOCK = b"kvferry.block.v1"


def root_hash(salt: bytes = b"") -> BlockHash:
    """The parent of a sequence's first block. Sequences with different salts share no block."""
    return hashlib.blake2b(salt, digest_size=HASH_BYTES, person=_ROOT).digest()


def extend(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of the block that holds ``token_ids`` and comes after ``parent``.

    Args:
        parent: hash of the block before it, or :func:`root_hash`.
        token_ids: of one full block.

    Raises:
        InvariantViolation: a token id is 2**31 or above.
    """
    return _digest(parent + _little_endian(token_ids))


def block_hashes(token_ids: Sequence[int], block_size: int, salt: bytes = b"") -> list[BlockHash]:
    """The chain of hashes of the full blocks of ``token_ids``; a last, partial block has none.

    Raises:
        ConfigError: ``block_size`` is below 1.
        InvariantViolation: a token id is 2**31 or above.
    """
    if block_size < 1:
        raise ConfigError(f"block_size must be at least 1, got {block_size}", field="block_size")
    data = _little_endian(token_ids)
    step = block_size * 4
    chain: list[BlockHash] = []
    parent = root_hash(salt)
    for start in range(0, len(data) - step + 1, step):
        parent = _digest(parent + data[start : start + step])
        chain.append(parent)
    return chain


def _digest(data: bytes) -> BlockHash:
    return hashlib.blake2b(data, digest_size=HASH_BYTES, person=_BLOCK).digest()


def _little_endian(token_ids: Sequence[int]) -> bytes:
    try:
        return np.asarray(token_ids, dtype="<i4").tobytes()
    except OverflowError as error:
        raise InvariantViolation(f"token_ids must lie below 2**31, got {max(token_ids)}") from error


class PrefixIndex:
    """Which block holds which prefix, and the parked ones in the order they may be evicted."""

    def __init__(self) -> None:
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
        del self._block_of[self._hash_of.pop(block)]
        return block

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
