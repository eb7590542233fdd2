"""Which workers there are, and which of them live. Decides only; the service does the I/O.

Life of a worker here: it joins with its first heartbeat, is lost when heartbeats stop, when its connection ends and no
heartbeat comes over a new one at once, when its step loop is wedged or a frame cannot be queued for it, joins again
when it beats well, is replaced by a newer incarnation of the same name, and is forgotten when it was lost for long. One
that has a new connection is lost and joins in one: it lives, but what it was sent may not have come. A worker that
drains is live, but takes no new work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from protocol.codec import SPOKEN
from protocol.connections import RECONNECT_AFTER
from protocol.ids import Peer, Role
from protocol.messages import Heartbeat, WorkerLoad, WorkerProfile
from protocol.transfer_counts import TransferCounts
from protocol.versions import Versions
from router.totals import Totals

MAX_WORKERS = 4096
"""Names that are remembered at most; heartbeats of further ones are not heard."""


RENEWED = "its connection was made anew, and what was on its way may be lost"
"""Why work that is under way begins anew though its worker lives."""
RECONNECTING = 0.25
"""Seconds in which a worker whose connection has ended beats over a new one, if it lives."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One incarnation of one worker, as its last heartbeat showed it.

    Attributes:
        identity: how the hub addresses it.
        last_seen: when the last heartbeat came (seconds, this process's monotonic clock).
        lost: why it is not live; empty while it is.
        transfer: what it counts of its handoffs.
        earlier: what earlier incarnations of the name had counted when they were last heard of, by their role.
        disconnected: when its connection ended, if nothing was heard over another one since.
        speaks: versions of the wire.
    """

    peer: Peer
    identity: bytes
    profile: WorkerProfile
    load: WorkerLoad
    last_seen: float
    lost: str = ""
    transfer: TransferCounts = field(default_factory=TransferCounts)
    earlier: Mapping[Role, Totals] = field(default_factory=dict)
    disconnected: float | None = None
    speaks: Versions = SPOKEN

    @property
    def totals(self) -> Totals:
        """What this and the earlier incarnations counted in its role: it never falls as long as the name is known."""
        return self.earlier.get(self.profile.role, Totals()).plus(self.load, self.transfer)

    @property
    def live(self) -> bool:
        """Whether its running work can go on."""
        return not self.lost

    @property
    def accepts_work(self) -> bool:
        """Whether new work may go to it."""
        return self.live and not self.load.draining

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens that it got through per second of its steps, prefix hits included; 0 while it has done none."""
        load = self.load
        through = load.prefill_tokens + load.cached_tokens
        return through / load.step_seconds if load.step_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """``peer`` takes work now and did not before; ``returned`` when this incarnation was known already."""

    peer: Peer
    returned: bool


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """``peer`` was live and is not any more."""

    peer: Peer
    reason: str


WorkerEvent = WorkerJoined | WorkerLost


class WorkerRegistry:
    """Every worker that was heard of lately, by name.

    Args:
        worker_timeout: seconds without a heartbeat after which a worker is lost.
        step_age_bound: seconds without a round of its step loop after which it is lost.
        forget_after: seconds after which a lost worker is dropped.

    Attributes:
        version: grows by one with each change of what :meth:`workers` gives.
    """

    def __init__(self, worker_timeout: float, step_age_bound: float, forget_after: float) -> None:
        self._worker_timeout = worker_timeout
        self._step_age_bound = step_age_bound
        self._forget_after = forget_after
        self.version = 0
        self._workers: dict[str, Worker] = {}
        self._last_tick: float | None = None

    def heartbeat(
        self, sender: Peer, identity: bytes, message: Heartbeat, now: float, speaks: Versions = SPOKEN
    ) -> list[WorkerEvent]:
        """Take in one heartbeat; that of an older incarnation than the known one changes nothing."""
        known = self._workers.get(sender.name)
        if known is not None and sender.incarnation < known.peer.incarnation:
            return []
        if known is None and len(self._workers) >= MAX_WORKERS:
            return []
        age = message.load.step_age
        wedged = f"its step loop has stood for {age:.1f} s" if age > self._step_age_bound else ""
        same = known is not None and known.peer == sender
        earlier: Mapping[Role, Totals] = {} if known is None else known.earlier
        if known is not None and not same:
            earlier = {**earlier, known.profile.role: known.totals}
        ended = known.disconnected if same and known is not None else None
        if ended is not None and now - ended >= RECONNECT_AFTER:
            ended = None
        worker = Worker(
            sender, identity, message.profile, message.load, now, wedged, message.transfer, earlier, ended, speaks
        )
        self._put(worker)
        events: list[WorkerEvent] = []
        if known is not None and known.live and not same:
            events.append(WorkerLost(known.peer, "a newer incarnation took its place"))
        if same and known is not None and known.live and wedged:
            events.append(WorkerLost(sender, wedged))
        if worker.accepts_work and not (same and known is not None and known.accepts_work):
            events.append(WorkerJoined(sender, returned=same))
        return events

    def renewed(self, identity: bytes) -> list[WorkerEvent]:
        """Whoever has that identity has a new connection in place of another one."""
        for worker in self._workers.values():
            if worker.identity == identity and worker.live:
                lost = WorkerLost(worker.peer, RENEWED)
                return [lost, WorkerJoined(worker.peer, returned=True)] if worker.accepts_work else [lost]
        return []

    def disconnected(self, identity: bytes, now: float) -> None:
        """The last connection of whoever has that identity ended: its process did, or it makes another one."""
        for worker in list(self._workers.values()):
            if worker.identity == identity and worker.live:
                self._put(replace(worker, disconnected=now))

    def tick(self, now: float) -> list[WorkerEvent]:
        """Find the workers whose heartbeats or connections ended, and drop those lost for long."""
        gap = 0.0 if self._last_tick is None else now - self._last_tick
        self._last_tick = now
        # When this process itself stood still, heartbeats lie unread: that silence is not the workers' fault.
        excuse = gap if gap > self._worker_timeout / 2 else 0.0
        events: list[WorkerEvent] = []
        for name, worker in list(self._workers.items()):
            seen = min(worker.last_seen + excuse, now)
            silent = now - seen
            if worker.live and silent > self._worker_timeout:
                reason = f"no heartbeat for {silent:.1f} s"
                self._put(replace(worker, last_seen=seen, lost=reason))
                events.append(WorkerLost(worker.peer, reason))
            elif worker.live and worker.disconnected is not None and now - worker.disconnected > RECONNECTING + excuse:
                reason = "its connection ended"
                self._put(replace(worker, lost=reason, disconnected=None))
                events.append(WorkerLost(worker.peer, reason))
            elif not worker.live and silent > self._forget_after:
                del self._workers[name]
                self.version += 1
            elif excuse:
                self._put(replace(worker, last_seen=seen))
        return events

    def unreachable(self, peer: Peer) -> list[WorkerEvent]:
        """A frame could not be queued for ``peer``: it is lost until it beats again."""
        worker = self.find(peer)
        if worker is None or not worker.live:
            return []
        reason = "its connection is gone or too far behind"
        self._put(replace(worker, lost=reason))
        return [WorkerLost(peer, reason)]

    def _put(self, worker: Worker) -> None:
        self._workers[worker.peer.name] = worker
        self.version += 1

    def find(self, peer: Peer) -> Worker | None:
        """The worker of exactly this incarnation, live or lost."""
        worker = self._workers.get(peer.name)
        return worker if worker is not None and worker.peer == peer else None

    def workers(self) -> tuple[Worker, ...]:
        """All that are known, lost ones included, by name. May be called in any thread: it looks but once."""
        return tuple(worker for _, worker in sorted(self._workers.items()))
