"""Whoever watches the cluster gets a snapshot of it again and again, as events.

Life cycle of :class:`Watching`: made idle; :meth:`Watching.show` for each one who watches, until that one leaves or
takes too little; :meth:`Watching.close` ends what is shown, and nothing is shown any more. There is no task behind it:
each watcher asks for the shared snapshot in its turn, and the first to find it too old has a new one taken. So nothing
is computed while nobody watches, and hardly more than one snapshot in each interval however many do.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from protocol.errors import Overloaded, RequestCancelled
from router.front.exchange import Exchange
from router.front.formats import event

SERVES = 0.9
"""Part of an interval for which a snapshot serves: whose timer is a little early shall not get the last one again."""


class SharedSnapshot:
    """The last snapshot, for as long as it is young enough.

    Args:
        take: takes one.
        lifetime: seconds that it serves for.
    """

    def __init__(self, take: Callable[[], bytes], lifetime: float) -> None:
        self._take = take
        self._lifetime = lifetime
        self._taken: float | None = None
        self._snapshot = b""

    def at(self, now: float) -> bytes:
        """A snapshot that at ``now`` (monotonic seconds) still serves."""
        if self._taken is None or now - self._taken >= self._lifetime:
            self._snapshot, self._taken = self._take(), now
        return self._snapshot


class Watching:
    """All who watch.

    Args:
        take: takes a snapshot, in JSON.
        most: who watch at a time.
        most_each: of them, those with one key, or where no key is needed, from one address.
        interval: seconds from one snapshot to the next.
        patience: seconds that a watcher may take for one.
    """

    def __init__(
        self, take: Callable[[], bytes], *, most: int, most_each: int, interval: float, patience: float
    ) -> None:
        self._shared = SharedSnapshot(take, SERVES * interval)
        self._most = most
        self._most_each = most_each
        self._interval = interval
        self._patience = patience
        self._watchers: Counter[str] = Counter()
        self._closing = asyncio.Event()

    @property
    def watchers(self) -> int:
        """How many watch."""
        return self._watchers.total()

    async def show(self, exchange: Exchange) -> None:
        """Send snapshots, the first at once. The request's body must have been read.

        Raises:
            Overloaded: as many watch as may, of all or of this one's kind.
            RequestCancelled: the watcher went away, or is too slow.
        """
        who = f"address {exchange.address}" if exchange.holder is None else f"key {exchange.holder.key.name}"
        if self._watchers[who] >= self._most_each:
            whose = "from this address" if exchange.holder is None else "with this key"
            raise Overloaded(f"{self._most_each} watch the cluster {whose}, and no more may at a time", self._patience)
        if self.watchers >= self._most:
            raise Overloaded(f"{self._most} watch the cluster, and no more may at a time", self._patience)
        self._watchers[who] += 1
        try:
            await exchange.until_gone(self._events(exchange))
        finally:
            self._watchers[who] -= 1
            if not self._watchers[who]:
                del self._watchers[who]

    def close(self) -> None:
        """End all answers, as soon as each has had what it is being sent."""
        self._closing.set()

    async def _events(self, exchange: Exchange) -> None:
        await exchange.start_events()
        if exchange.method != "HEAD":
            while not self._closing.is_set():
                await self._send(exchange, event(self._shared.at(time.monotonic())))
                await self._pause()
        await exchange.end()

    async def _send(self, exchange: Exchange, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await exchange.write(data)
        except TimeoutError as error:
            raise RequestCancelled("the watcher takes too little") from error

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._interval):
                await self._closing.wait()
        except TimeoutError:
            return
