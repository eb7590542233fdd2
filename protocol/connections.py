"""Which of a bound socket's connections belongs to which peer, so that a connection's end tells whose it was.

Life cycle of a connection here: accepted, nobody's -> its first frame names its owner -> ended. It is known by its file
descriptor, which a later one may be given again. Decides only; :class:`~protocol.sockets.Hub` does the I/O.
"""

from __future__ import annotations

from collections import OrderedDict

RECONNECT_AFTER = 0.05
"""Seconds from a connection's end to its peer's next one: what is read sooner still came over the old one."""
MAX_PARTED = 4096
"""Peers without a connection that are remembered at most, to know those who come back."""


class Connections:
    """The connections of one bound socket."""

    def __init__(self) -> None:
        self._owners: dict[int, bytes] = {}
        self._nameless: set[int] = set()
        self._parted: OrderedDict[bytes, None] = OrderedDict()

    @property
    def nameless(self) -> bool:
        """Whether some connection has not said yet whose it is."""
        return bool(self._nameless)

    def accepted(self, descriptor: int) -> None:
        """A peer has connected."""
        self._owners.pop(descriptor, None)
        self._nameless.add(descriptor)

    def named(self, descriptor: int, identity: bytes) -> bool:
        """A frame of ``identity`` came over a connection; one that has an owner keeps it.

        Returns:
            Whether the connection has just got its owner, who had another one before.
        """
        if descriptor not in self._nameless:
            return False
        renewed = identity in self._parted or identity in self._owners.values()
        self._parted.pop(identity, None)
        self._nameless.remove(descriptor)
        self._owners[descriptor] = identity
        return renewed

    def ended(self, descriptor: int) -> bytes | None:
        """A connection has ended; returns the owner whose last one it was."""
        self._nameless.discard(descriptor)
        owner = self._owners.pop(descriptor, None)
        if owner is None or owner in self._owners.values():
            return None
        self._parted[owner] = None
        if len(self._parted) > MAX_PARTED:
            self._parted.popitem(last=False)
        return owner
