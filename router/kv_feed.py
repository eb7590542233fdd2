r"""Keeps the block index in step with each worker's prefix cache: takes in its KV events, and sees when one was lost.

::

    STRANGE --asked--> AWAITING --first page--> LOADING --last page--> FOLLOWING
       ^                  | a gap in the numbers, or no answer in time     |
       \-------------------------------------------------------------------/

Decides only: each event gives the message, if any, that the worker is to be sent.

What comes goes into the index at once where little comes, and otherwise every ``PAUSE``: an index takes up many blocks
sooner than each of a thousand workers' by themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np

from protocol.ids import Peer
from protocol.kv_events import KVEvents, KVFollow, KVSnapshot
from protocol.transitions import Tracker, TransitionTable
from router.block_index import BlockIndex, Move
from router.block_slots import Array

ASK_AGAIN = 1.0
"""Seconds without an answer after which a worker is asked again."""
PAUSE = 2e-3
"""Seconds that what has come may wait for more: workers tell of changes every 0.1 s anyway."""
RENEW = 4.0
"""Seconds between two signs to a worker that its events are still wanted."""


class FeedState(Enum):
    """How well a worker's prefix cache is known."""

    STRANGE = "strange"
    AWAITING = "awaiting"
    LOADING = "loading"
    FOLLOWING = "following"


class FeedEvent(Enum):
    """What moves a feed."""

    ASKED = "asked"
    PAGE = "page"
    COMPLETE = "complete"
    LOST = "lost"


FEEDS = TransitionTable(
    "kv feed",
    FeedState.STRANGE,
    {
        (FeedState.STRANGE, FeedEvent.ASKED): FeedState.AWAITING,
        (FeedState.AWAITING, FeedEvent.ASKED): FeedState.AWAITING,
        (FeedState.AWAITING, FeedEvent.PAGE): FeedState.LOADING,
        (FeedState.AWAITING, FeedEvent.COMPLETE): FeedState.FOLLOWING,
        (FeedState.LOADING, FeedEvent.PAGE): FeedState.LOADING,
        (FeedState.LOADING, FeedEvent.COMPLETE): FeedState.FOLLOWING,
        **{(state, FeedEvent.LOST): FeedState.STRANGE for state in FeedState},
    },
)
"""The one transition table of a feed."""


@dataclass(slots=True)
class Feed:
    """One incarnation of one worker.

    Attributes:
        row: its row in the index.
        sequence: of the last events, or of the snapshot being read.
        pages: read of that.
        asked: when it was last sent a message.
    """

    peer: Peer
    row: int
    tracker: Tracker[FeedState, FeedEvent]
    sequence: int = 0
    pages: int = 0
    asked: float = 0.0


class KVFeeds:
    """The feeds of all workers, into one index.

    Attributes:
        resyncs: snapshots that were asked for because events were lost.
    """

    def __init__(self, index: BlockIndex) -> None:
        self.resyncs = 0
        self._index = index
        self._feeds: dict[str, Feed] = {}
        self._moves: list[Move] = []
        self._settled = -math.inf

    def heartbeat(self, peer: Peer, row: int, sequence: int, now: float) -> KVFollow | None:
        """A worker beats, and the number of its last events is ``sequence``; a new incarnation has an empty cache."""
        self.settle(now)
        feed = self._feeds.get(peer.name)
        if feed is None or feed.peer != peer or feed.row != row:
            self.forget(peer.name)
            feed = self._feeds[peer.name] = Feed(peer, row, FEEDS.start(str(peer)))
        state = feed.tracker.state
        if state is FeedState.STRANGE:
            # One that has cached nothing yet has nothing to tell, and shows it when it has.
            return self._ask(feed, now) if sequence else None
        if state is FeedState.FOLLOWING:
            if sequence > feed.sequence:
                return self._lost(feed, now)
            if now - feed.asked < RENEW:
                return None
            feed.asked = now
            return KVFollow(sequence=feed.sequence)
        return self._ask(feed, now) if now - feed.asked >= ASK_AGAIN else None

    def events(self, peer: Peer, events: KVEvents, now: float) -> KVFollow | None:
        """Changes came; they count only for who is followed without a gap."""
        feed = self._known(peer)
        if feed is None or feed.tracker.state is not FeedState.FOLLOWING or events.sequence <= feed.sequence:
            return None
        if events.sequence != feed.sequence + 1 or not (_whole(events.stored) and _whole(events.removed)):
            return self._lost(feed, now)
        feed.sequence = events.sequence
        if events.removed:
            self._moves.append(Move(feed.row, _keys(events.removed), stored=False))
        if events.stored:
            self._moves.append(Move(feed.row, _keys(events.stored), stored=True))
        self.settle(now)
        return None

    def snapshot(self, peer: Peer, page: KVSnapshot, now: float) -> KVFollow | None:
        """A page of everything came; only whole snapshots that were asked for count."""
        feed = self._known(peer)
        if feed is None or feed.tracker.state not in (FeedState.AWAITING, FeedState.LOADING):
            return None
        if page.page == 0:
            # Also in the midst of another one: it was asked for twice.
            feed.sequence, feed.pages = page.sequence, 0
            self._drop(feed.row)
        if page.page != feed.pages or page.sequence != feed.sequence or not _whole(page.keys):
            return self._lost(feed, now)
        feed.pages += 1
        self._moves.append(Move(feed.row, _keys(page.keys), stored=True))
        self.settle(now)
        feed.tracker.move(FeedEvent.COMPLETE if page.last else FeedEvent.PAGE)
        return None

    def forget(self, name: str) -> None:
        """A worker is gone for good, or has lost its cache."""
        feed = self._feeds.pop(name, None)
        if feed is not None:
            self._drop(feed.row)

    def settle(self, now: float) -> None:
        """Put into the index what has come, unless that was just done."""
        if self._moves and now - self._settled >= PAUSE:
            self._settled = now
            self._settle()

    def _drop(self, row: int) -> None:
        self._settle()
        self._index.drop(row)

    def _settle(self) -> None:
        if self._moves:
            self._index.change(self._moves)
            self._moves = []

    def state(self, peer: Peer) -> FeedState | None:
        """How well the cache of this incarnation is known; None when it was never heard of."""
        feed = self._known(peer)
        return None if feed is None else feed.tracker.state

    def _known(self, peer: Peer) -> Feed | None:
        feed = self._feeds.get(peer.name)
        return feed if feed is not None and feed.peer == peer else None

    def _ask(self, feed: Feed, now: float) -> KVFollow:
        feed.tracker.move(FeedEvent.LOST)
        feed.tracker.move(FeedEvent.ASKED)
        feed.asked = now
        return KVFollow()

    def _lost(self, feed: Feed, now: float) -> KVFollow:
        self.resyncs += 1
        return self._ask(feed, now)


def _whole(keys: bytes) -> bool:
    return len(keys) % 8 == 0


def _keys(keys: bytes) -> Array:
    return np.frombuffer(keys, dtype="<u8").astype(np.uint64, copy=False)
