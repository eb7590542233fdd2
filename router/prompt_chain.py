"""The keys of a prompt's blocks: each is computed once, when somebody first asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from protocol.block_hashes import BlockHash, chain_on, root_hash
from protocol.kv_events import KEY_BYTES
from router.block_slots import Array

PIECE = 64
"""Blocks in the first part; each further one is twice as long. A prompt that nobody knows is hashed no further."""


class Prompt(Protocol):
    """What placement sees of a prompt."""

    @property
    def length(self) -> int:
        """Its tokens."""

    def keys(self, block_size: int) -> Iterator[Array]:
        """Of its full blocks of that many tokens, in order, in parts."""


class PromptChain:
    """Keys of the full blocks of one prompt, for one block size.

    Life cycle: made with the tokens of a first attempt, :meth:`grow` before each further one.
    """

    def __init__(self, token_ids: tuple[int, ...], salt: str, block_size: int) -> None:
        self._token_ids = token_ids
        self._block_size = block_size
        self._last: BlockHash = root_hash(salt.encode())
        self._pieces: list[Array] = []
        self._hashed = 0

    def grow(self, token_ids: tuple[int, ...]) -> None:
        """The prompt goes on: ``token_ids`` begins with what it was."""
        self._token_ids = token_ids

    def pieces(self) -> Iterator[Array]:
        """The keys in order, in parts."""
        yield from self._pieces
        while (left := len(self._token_ids) // self._block_size - self._hashed) > 0:
            count = min(left, max(PIECE, self._hashed))
            start = self._hashed * self._block_size
            tokens = self._token_ids[start : start + count * self._block_size]
            hashes = chain_on(self._last, tokens, self._block_size)
            self._last = hashes[-1]
            self._hashed += count
            keys = np.frombuffer(b"".join(each[:KEY_BYTES] for each in hashes), dtype="<u8")
            # 0 stands for no key in the index.
            self._pieces.append(np.maximum(keys.astype(np.uint64, copy=False), 1))
            yield self._pieces[-1]


class PromptChains:
    """The chains of one prompt, by block size: workers may differ in it."""

    def __init__(self, token_ids: tuple[int, ...] = (), salt: str = "") -> None:
        self.token_ids = token_ids
        self._salt = salt
        self._chains: dict[int, PromptChain] = {}

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids)

    def keys(self, block_size: int) -> Iterator[Array]:
        """Of its full blocks of that many tokens, in order, in parts."""
        return self.of(block_size).pieces()

    def grow(self, token_ids: tuple[int, ...]) -> None:
        """As :meth:`PromptChain.grow`."""
        self.token_ids = token_ids
        for chain in self._chains.values():
            chain.grow(token_ids)

    def of(self, block_size: int) -> PromptChain:
        """The chain for blocks of that many tokens."""
        chain = self._chains.get(block_size)
        if chain is None:
            chain = self._chains[block_size] = PromptChain(self.token_ids, self._salt, block_size)
        return chain
