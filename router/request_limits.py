"""Bounds on one request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """Bounds on one request; see ``RouterConfig`` for each. Times in seconds."""

    max_attempts: int = 4
    worker_wait: float = 5.0
    worker_wait_first: float = 0.0
    retry_backoff: float = 0.05
    reorder_grace: float = 2.0
    stall_timeout: float = 60.0
    lease_ttl: float = 30.0
    request_timeout: float = 600.0
    priority_aging: float = 2.0
