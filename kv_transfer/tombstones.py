"""Keys that have ended, remembered so that a late message about one changes nothing.

Life cycle: a key is buried when it ends, or when it is cancelled before it began; it is forgotten after ``ttl``
seconds, or earlier when ``capacity`` younger ones push it out.
"""

from __future__ import annotations

from collections import OrderedDict

from protocol.errors import ConfigError
from protocol.ids import RequestKey
from protocol.messages import ErrorInfo


class Tombstones:
    """A bounded memory of ended keys, each with the error that a latecomer is told.

    Args:
        capacity: keys remembered at most.
        ttl: seconds that one is remembered; longer than any message can be late.

    Raises:
        ConfigError: a value is not above 0; names the field and the value.
    """

    def __init__(self, capacity: int = 16384, ttl: float = 600.0) -> None:
        for name, value in (("capacity", capacity), ("ttl", ttl)):
            if not value > 0:
                raise ConfigError(f"{name} must be above 0, got {value!r}", field=name)
        self._capacity = capacity
        self._ttl = ttl
        self._graves: OrderedDict[RequestKey, tuple[float, ErrorInfo]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graves)

    def bury(self, key: RequestKey, error: ErrorInfo, now: float) -> None:
        """Remember that ``key`` has ended; the first word about a remembered key stands."""
        if self.find(key, now) is not None:
            return
        self._graves[key] = (now + self._ttl, error)
        if len(self._graves) > self._capacity:
            self._graves.popitem(last=False)

    def find(self, key: RequestKey, now: float) -> ErrorInfo | None:
        """What a latecomer of ``key`` is told, or None for a key that has not ended as far as is known."""
        grave = self._graves.get(key)
        if grave is None:
            return None
        forgotten_at, error = grave
        if now >= forgotten_at:
            del self._graves[key]
            return None
        return error
