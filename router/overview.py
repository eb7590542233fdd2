"""What a router says of its workers and of itself: the answer of ``/cluster``, and each event of ``/cluster/events``.

The router builds these (:mod:`router.snapshot`) and our client reads them back, so the two cannot part. Counters of a
worker are those of its incarnation; the router's own begin with its ``uptime_s``.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from protocol.messages import WorkerLoad


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """Told as JSON; who reads it ignores fields that it does not know."""


class WorkerBreaker(_Told, frozen=True, kw_only=True):
    """Whether a worker gets new work (``closed``), or for now does not, and why."""

    state: str
    reason: str | None = None
    openings: int = 0


class TransportUse(_Told, frozen=True, kw_only=True):
    """What a prefill worker shipped by one transport."""

    ships: int
    kv_bytes: int


class Handoffs(_Told, frozen=True, kw_only=True):
    """Leases of a prefill worker, or imports of a decode worker.

    Attributes:
        opened: all of them so far: those that are open, and those that have ended.
        open: under way.
        draining: ended, and the transport may still touch their blocks.
        ended: by ``protocol.transfer_counts.Outcome``.
        transports: by URI scheme (prefill).
    """

    opened: int = 0
    open: int = 0
    draining: int = 0
    ended: dict[str, int] = {}
    transports: dict[str, TransportUse] = {}


class WorkerOverview(_Told, frozen=True, kw_only=True):
    """One worker, as its last heartbeat has it.

    Attributes:
        state: ``live``, ``draining`` or ``lost``.
        reason: why it is lost.
        last_seen_s: seconds since its last heartbeat.
        max_sequences: that a step of it takes at most; 0 where that is not told.
        layout: of its KV.
        leaked_blocks: that no state accounts for; 0 in a sound worker.
    """

    name: str
    incarnation: int
    role: str
    state: str
    reason: str | None = None
    breaker: WorkerBreaker
    last_seen_s: float
    device: str
    pid: int
    max_model_len: int
    num_blocks: int
    max_sequences: int = 0
    layout: dict[str, Any]
    load: WorkerLoad
    leaked_blocks: int
    handoffs: Handoffs = Handoffs()


class LiveStates(_Told, frozen=True, kw_only=True):
    """Requests under way, by where they are."""

    queued: int = 0
    prefilling: int = 0
    handoff: int = 0
    decoding: int = 0


class Unserved(_Told, frozen=True, kw_only=True):
    """What clients ask for and no worker has been sent. Choices of one prompt count once.

    Attributes:
        waiting: requests that wait in the router, for their turn or for a worker, and not those that are promised
            nothing but a deadline.
        waiting_tokens: of their prompts.
        refused: requests that were answered with 429 since the router began.
        refused_tokens: of their prompts.
    """

    waiting: int = 0
    waiting_tokens: int = 0
    refused: int = 0
    refused_tokens: int = 0


class RouterTotals(_Told, frozen=True, kw_only=True):
    """What the router has counted.

    Attributes:
        ended: requests by outcome (``finished``, ``failed``, ``cancelled``) and code.
        retries: attempts that another one followed, by error code.
        prompt_tokens: of requests let in.
        output_tokens: given to clients.
        handoffs: requests that a decode worker took over.
        remote_prefills, local_prefills: first tokens by where they came from.
    """

    ended: dict[str, dict[str, int]] = {}
    retries: dict[str, int] = {}
    prompt_tokens: int = 0
    output_tokens: int = 0
    handoffs: int = 0
    remote_prefills: int = 0
    local_prefills: int = 0


class Latency(_Told, frozen=True, kw_only=True):
    """A histogram of durations.

    Attributes:
        bounds: upper bounds of the buckets, in seconds, ascending.
        counts: of each bucket alone; one more than bounds, for what is above the last.
        total_s: sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total_s: float

    def quantile(self, share: float) -> float | None:
        """Seconds that so large a share of the values is not above, as Prometheus estimates it; None without values."""
        wanted = share * sum(self.counts)
        if not wanted:
            return None
        reached = 0
        for index, count in enumerate(self.counts[:-1]):
            reached += count
            if reached >= wanted:
                low = self.bounds[index - 1] if index else 0.0
                return low + (self.bounds[index] - low) * (1.0 - (reached - wanted) / count)
        return self.bounds[-1]


class Alert(_Told, frozen=True, kw_only=True):
    """Something that somebody should look at.

    Attributes:
        kind: ``unready`` when no new request can be served.
        worker: whom it is about; None for the cluster.
        text: for a person; holds no address.
    """

    kind: Literal["unready", "lost", "breaker", "leak"]
    worker: str | None
    text: str


class ClassOverview(_Told, frozen=True, kw_only=True):
    """One class of requests, where a router has such. Requests that start as one count as one.

    Attributes:
        ttft_s, tpot_s: promised; 0 promises nothing.
        waiting: in the router, for their turn.
        admitted: let in so far.
        refused: by reason.
        kept, missed: finished requests by target, ``ttft`` or ``tpot``.
    """

    name: str
    ttft_s: float
    tpot_s: float
    waiting: int
    admitted: int
    refused: dict[str, int] = {}
    kept: dict[str, int] = {}
    missed: dict[str, int] = {}


class ClusterOverview(_Told, frozen=True, kw_only=True):
    """A router and the workers that it knows.

    Attributes:
        uptime_s: of this router; two overviews of one router are so many seconds apart as theirs differ by.
        live_requests: how many are under way.
        requests: the same by state.
        unserved: of what comes, that which the workers have no part in yet, or will not.
        classes: of requests, and what waits of each; none where requests go to workers as they come.
        latency: ``ttft``, ``tpot``, ``handoff``, ``queue`` and ``e2e``, of all requests so far.
    """

    model: str
    router: str
    policy: str
    live_requests: int
    max_model_len: int | None = None
    uptime_s: float = 0.0
    requests: LiveStates = LiveStates()
    unserved: Unserved = Unserved()
    classes: tuple[ClassOverview, ...] = ()
    totals: RouterTotals = RouterTotals()
    latency: dict[str, Latency] = {}
    alerts: tuple[Alert, ...] = ()
    workers: tuple[WorkerOverview, ...]
