"""Who may hold a block of the KV pool, and the state a block is in for it."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class HolderKind(IntEnum):
    """What holds a block, the weakest first."""

    TABLE = 0
    """A sequence's block table: kernels read it, and write it until it is sealed."""
    LEASE = 1
    """An open lease: the transport reads it, and nobody writes what that reads."""
    IMPORT = 2
    """An open import: the transport writes it, nobody else may touch it."""
    QUARANTINE = 3
    """A lease or import that ended with the transport still at it."""


class Owner(NamedTuple):
    """One holder; it holds a block at most once."""

    kind: HolderKind
    key: str

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} {self.key}"


class BlockState(IntEnum):
    """Where a block stands in its life."""

    FREE = 0
    ACTIVE = 1
    CACHED = 2
    EXPORTED = 3
    IMPORTING = 4
    DRAINING = 5
    RESERVED = 6


STATE_OF_HOLDER = {
    HolderKind.TABLE: BlockState.ACTIVE,
    HolderKind.LEASE: BlockState.EXPORTED,
    HolderKind.IMPORT: BlockState.IMPORTING,
    HolderKind.QUARANTINE: BlockState.DRAINING,
}
"""The state of a block whose strongest holder is of this kind."""
