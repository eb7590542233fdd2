"""What the router says of its workers and of itself."""

from __future__ import annotations

from typing import Any

import msgspec

from protocol.messages import WorkerLoad
from router.client.results import decoded


class WorkerBreaker(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a worker gets new work (``closed``), or for now does not, and why."""

    state: str
    reason: str | None = None
    openings: int = 0


class WorkerOverview(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, as its last heartbeat has it.

    Attributes:
        state: ``live``, ``draining`` or ``lost``.
        reason: why it is lost.
        last_seen_s: seconds since its last heartbeat.
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
    layout: dict[str, Any]
    load: WorkerLoad
    leaked_blocks: int


class ClusterOverview(msgspec.Struct, frozen=True, kw_only=True):
    """A router and the workers that it knows."""

    model: str
    router: str
    policy: str
    live_requests: int
    max_model_len: int | None = None
    workers: tuple[WorkerOverview, ...]


def overview_of(body: bytes) -> ClusterOverview:
    """What ``/cluster`` says.

    Raises:
        MalformedFrame: it is something else.
    """
    return decoded(body, ClusterOverview, "the router's view of the cluster cannot be read")
