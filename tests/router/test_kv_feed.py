"""A router's picture of prefix caches, over a wire that loses, repeats and delays what workers tell."""

from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.prefix_changes import PrefixChanges
from protocol.ids import Peer
from protocol.kv_events import MAX_KEYS, KVEvents, KVFollow, KVSnapshot
from protocol.kv_publisher import FOLLOW_TTL, KVPublisher, keys_of
from router.block_index import BlockIndex, rows_of
from router.kv_feed import ASK_AGAIN, PAUSE, RENEW, FeedState, KVFeeds

HASHES = [bytes([index]) * 16 for index in range(1, 30)]
ROUTER = "router"


def key_of(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:8], "little")


class FakeWorker:
    """A prefix cache, and what it tells."""

    def __init__(self, row: int, incarnation: int) -> None:
        self.peer = Peer(f"w{row}", incarnation)
        self.row = row
        self.cache: set[bytes] = set()
        self.changes = PrefixChanges()
        self.publisher = KVPublisher(self.changes.take_keys, lambda: keys_of(sorted(self.cache)))

    def change(self, block_hash: bytes) -> None:
        if block_hash in self.cache:
            self.cache.remove(block_hash)
            self.changes.removed(block_hash)
        else:
            self.cache.add(block_hash)
            self.changes.stored(block_hash)


class Feeding(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.index = BlockIndex()
        self.feeds = KVFeeds(self.index)
        self.workers = [FakeWorker(row, 1) for row in range(3)]
        self.wire: deque[tuple[Peer, int, object]] = deque()
        self.beat(lost=False)

    def send(self, worker: FakeWorker, messages: list[object], lost: bool = False) -> None:
        if not lost:
            self.wire += [(worker.peer, worker.row, message) for message in messages]

    def flush(self, worker: FakeWorker, lost: bool) -> None:
        events = worker.publisher.flush()
        if ROUTER in worker.publisher.followers(self.now):
            self.send(worker, list(events), lost)

    @rule(row=st.integers(0, 2), changed=st.lists(st.sampled_from(HASHES), max_size=8), lost=st.booleans())
    def change(self, row: int, changed: list[bytes], lost: bool) -> None:
        for block_hash in changed:
            self.workers[row].change(block_hash)
        self.flush(self.workers[row], lost)

    @rule(row=st.integers(0, 2))
    def restart_worker(self, row: int) -> None:
        self.workers[row] = FakeWorker(row, self.workers[row].peer.incarnation + 1)

    @rule()
    def restart_router(self) -> None:
        self.index = BlockIndex()
        self.feeds = KVFeeds(self.index)
        self.wire.clear()
        for worker in self.workers:
            worker.publisher.forget(ROUTER)

    @rule()
    def repeat(self) -> None:
        if self.wire:
            self.wire.append(self.wire[-1])

    @rule()
    def overtake(self) -> None:
        if len(self.wire) > 1:
            self.wire.rotate(1)

    @rule(lost=st.booleans())
    def beat(self, lost: bool) -> None:
        for worker in self.workers:
            self.flush(worker, lost)
            self.send(worker, [worker.publisher.sequence], lost)

    @rule(seconds=st.sampled_from([0.1, ASK_AGAIN, PAUSE, RENEW, FOLLOW_TTL]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(count=st.integers(1, 5))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.wire))):
            peer, row, message = self.wire.popleft()
            match message:
                case int():
                    if peer == self.workers[row].peer:  # the registry hears no older incarnation
                        self.answer(row, self.feeds.heartbeat(peer, row, message, self.now))
                case KVEvents():
                    self.answer(row, self.feeds.events(peer, message, self.now))
                case KVSnapshot():
                    self.answer(row, self.feeds.snapshot(peer, message, self.now))

    def answer(self, row: int, asked: KVFollow | None) -> None:
        if asked is not None:
            worker = self.workers[row]
            self.flush(worker, lost=False)
            self.send(worker, list(worker.publisher.follow(ROUTER, asked, self.now)))

    def rows_of(self, block_hash: bytes) -> set[int]:
        keys = np.array([key_of(block_hash)], dtype=np.uint64)
        return {row for bits, _ in self.index.depths([keys], 0b111) for row in rows_of(bits)}

    def settle(self) -> None:
        """Two seconds in which nothing is lost: enough for a router that has just started."""
        for _ in range(4):
            self.deliver(len(self.wire))
            self.now += 0.5
            self.beat(lost=False)
        while self.wire:
            self.deliver(len(self.wire))
        self.now += PAUSE
        self.feeds.settle(self.now)

    @rule()
    def settled_it_is_exact(self) -> None:
        self.settle()
        for worker in self.workers:
            known = {block_hash for block_hash in HASHES if worker.row in self.rows_of(block_hash)}
            assert known == worker.cache
            followed = self.feeds.state(worker.peer) is FeedState.FOLLOWING
            assert followed or not worker.publisher.sequence

    @invariant()
    def none_has_more_than_it_ever_had(self) -> None:
        assert self.index.holdings <= 3 * len(HASHES)


TestFeeding = Feeding.TestCase
TestFeeding.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def test_a_restarted_worker_has_nothing_at_once() -> None:
    index = BlockIndex()
    feeds = KVFeeds(index)
    old, new = FakeWorker(0, 1), FakeWorker(0, 2)
    for block_hash in HASHES:
        old.change(block_hash)
    old.publisher.flush()
    asked = feeds.heartbeat(old.peer, 0, old.publisher.sequence, 0.0)
    assert asked == KVFollow()
    for page in old.publisher.follow(ROUTER, asked, 0.0):
        feeds.snapshot(old.peer, page, 0.0)
    assert index.holdings == len(HASHES)
    assert feeds.heartbeat(new.peer, 0, 0, 1.0) is None
    assert index.holdings == 0
    feeds.events(old.peer, KVEvents(sequence=2, stored=HASHES[0][:8]), 1.0)
    assert index.holdings == 0, "what the former life still tells changes nothing"


def test_a_large_cache_comes_in_pages_and_its_changes_in_parts() -> None:
    hashes = [index.to_bytes(16, "little") for index in range(1, 2 * MAX_KEYS + 100)]
    hashes = [block_hash[:8][::-1] + block_hash[8:] for block_hash in hashes]
    changes = PrefixChanges()
    publisher = KVPublisher(changes.take_keys, lambda: keys_of(hashes))
    for block_hash in hashes:
        changes.stored(block_hash)
    parts = publisher.flush()
    assert [part.sequence for part in parts] == [1, 2, 3]
    pages = publisher.follow(ROUTER, KVFollow(), 0.0)
    assert [(page.sequence, page.page, page.last) for page in pages] == [(3, 0, False), (3, 1, False), (3, 2, True)]
    for messages in (parts, pages):
        index = BlockIndex()
        feeds = KVFeeds(index)
        feeds.heartbeat(Peer("w", 1), 0, 1, 0.0)
        if messages is parts:
            feeds.snapshot(Peer("w", 1), KVSnapshot(sequence=0), 0.0)
        for message in messages:
            take = feeds.events if isinstance(message, KVEvents) else feeds.snapshot
            assert take(Peer("w", 1), message, 0.0) is None  # type: ignore[arg-type]
        feeds.settle(PAUSE)
        assert index.holdings == len(hashes)


def test_only_who_follows_is_told() -> None:
    changes = PrefixChanges()
    publisher = KVPublisher(changes.take_keys, bytes)
    assert publisher.followers(0.0) == []
    publisher.follow(ROUTER, KVFollow(), 0.0)
    assert publisher.followers(FOLLOW_TTL - 0.1) == [ROUTER]
    publisher.follow(ROUTER, KVFollow(sequence=0), FOLLOW_TTL - 0.1)
    assert publisher.followers(2 * FOLLOW_TTL - 0.2) == [ROUTER]
    assert publisher.followers(2 * FOLLOW_TTL) == []


def test_what_comes_at_once_goes_into_the_index_together_and_nothing_waits_for_long() -> None:
    index = BlockIndex()
    feeds = KVFeeds(index)
    for row in range(3):
        feeds.heartbeat(Peer(f"w{row}", 1), row, 1, 0.0)
        feeds.snapshot(Peer(f"w{row}", 1), KVSnapshot(sequence=0), 0.0)
    for row in range(3):
        feeds.events(Peer(f"w{row}", 1), KVEvents(sequence=1, stored=HASHES[row][:8]), 1.0)
    assert index.holdings == 1, "the first at once"
    feeds.settle(1.0 + PAUSE / 2)
    assert index.holdings == 1
    feeds.settle(1.0 + PAUSE)
    assert index.holdings == 3
    feeds.events(Peer("w0", 1), KVEvents(sequence=2, stored=HASHES[4][:8], removed=HASHES[0][:8]), 1.0 + PAUSE)
    feeds.forget("w1")
    assert index.holdings == 2, "who is forgotten has nothing, and the others have what they told of"
