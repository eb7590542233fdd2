"""Which of a bound socket's connections belongs to which peer, so that a connection's end tells whose it was.

Life cycle of a connection here: accepted, nobody's -> its first frame names its owner -> ended. It is known by its file
descriptor, which a later one may be given again. Decides only; :class:`~protocol.sockets.Hub` does the I/O.
"""

from __future__ import annotations

RECONNECT_AFTER = 0.05
"""Seconds from a connection's end to its peer's next one: what is read sooner still came over the old one."""


class Connections:
    """The connections of one bound socket."""

    def __init__(self) -> None:
        self._owners: dict[int, bytes] = {}
        self._nameless: set[int] = set()

    @property
    def nameless(self) -> bool:
        """Whether some connection has not said yet whose it is."""
        return bool(self._nameless)

    def accepted(self, descriptor: int) -> None:
        """A peer has connected."""
        self._owners.pop(descriptor, None)
        self._nameless.add(descriptor)

    def named(self, descriptor: int, identity: bytes) -> None:
        """A frame of ``identity`` came over a connection; one that has an owner keeps it."""
        if descriptor in self._nameless:
            self._nameless.remove(descriptor)
            self._owners[descriptor] = identity

    def ended(self, descriptor: int) -> bytes | None:
        """A connection has ended; returns the owner whose last one it was."""
        self._nameless.discard(descriptor)
        owner = self._owners.pop(descriptor, None)
        return None if owner in self._owners.values() else owner
