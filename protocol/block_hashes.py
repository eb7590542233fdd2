"""Names of full blocks of tokens: each is the hash of everything up to and including the block.

The hash of a block is BLAKE2b over its parent's hash and its token ids, so one hash names a whole prefix, as in the
prefix caching of vLLM. It depends on nothing but the salt, the token ids and the block size: any two processes, on any
two hosts and over restarts, give the same value, so a router can tell which worker has what of a prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

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
    return chain_on(root_hash(salt), token_ids, block_size)


def chain_on(parent: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """As :func:`block_hashes`, of tokens that come after the block of ``parent``."""
    if block_size < 1:
        raise ConfigError(f"block_size must be at least 1, got {block_size}", field="block_size")
    data = _little_endian(token_ids)
    step = block_size * 4
    chain: list[BlockHash] = []
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
