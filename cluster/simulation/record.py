"""What becomes of the requests: one by one while they are under way, and in columns when they have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from cluster.bench.traces.request import TraceRequest
from cluster.simulation.job import Job
from cluster.simulation.prompt import SimulatedPrompt
from protocol.ids import Peer
from router.explanations import Decision
from router.slo.ticket import Ticket

if TYPE_CHECKING:
    from cluster.simulation.simulated_router import SimulatedRouter


class Outcome(IntEnum):
    """How a request ended."""

    PENDING = 0
    FINISHED = 1
    REFUSED = 2
    FAILED = 3


@dataclass(slots=True, eq=False)
class Request:
    """One request under way.

    Attributes:
        number: its place in the trace.
        trace: what it is.
        prompt: of its first attempt.
        router: that it came to.
        tenant: whose it is.
        at: when it came.
        attempt: which is under way.
        job: that attempt; None while none is placed.
        decision: why it went there.
        emitted: tokens that came in earlier attempts.
        first: when the first token of all came; None before.
        excluded: who failed it.
        wait_until: when it is given up for want of workers.
        ticket: its place in the router's queue, where that has one.
    """

    number: int
    trace: TraceRequest
    prompt: SimulatedPrompt
    router: SimulatedRouter
    at: float
    tenant: str = ""
    attempt: int = 0
    job: Job | None = None
    decision: Decision | None = None
    emitted: int = 0
    first: float | None = None
    excluded: frozenset[Peer] = frozenset()
    wait_until: float = 0.0
    ticket: Ticket[Request] | None = None


class Records:
    """All requests of a run, by number.

    Args:
        count: of requests.
        tenants: whose they may be.

    Attributes:
        outcome: of each, an :class:`Outcome`.
        at: when it came.
        ttft, tpot, e2e: seconds; not a number where there are none.
        predicted: time to the first token that was predicted of its first attempt.
        tokens: of its prompt and its answer.
        tenant: whose it is, as a place in a list of theirs.
        ended: how many have.
        refused, refused_tokens: how many of them were turned away, and the tokens of their prompts.
        retries: attempts beyond the first.
    """

    def __init__(self, count: int, tenants: Sequence[str] = ("",)) -> None:
        self.outcome = np.zeros(count, dtype=np.int8)
        self.at = np.zeros(count)
        self.ttft = np.full(count, np.nan)
        self.tpot = np.full(count, np.nan)
        self.e2e = np.full(count, np.nan)
        self.predicted = np.full(count, np.nan)
        self.tokens = np.zeros(count, dtype=np.int64)
        self.tenant = np.zeros(count, dtype=np.int16)
        self.tenants = tenants
        self.ended = 0
        self.refused = self.refused_tokens = 0
        self.retries = 0

    def first_token(self, request: Request, now: float) -> None:
        """The first token came."""
        request.first = now
        self.ttft[request.number] = now - request.at
        if request.decision is not None and not request.attempt:
            self.predicted[request.number] = request.decision.predicted_ttft

    def end(self, request: Request, outcome: Outcome, now: float) -> None:
        """A request has ended."""
        number = request.number
        self.ended += 1
        self.outcome[number] = outcome
        if outcome is Outcome.REFUSED:
            self.refused += 1
            self.refused_tokens += request.trace.prompt_tokens
        self.at[number] = request.at
        self.tokens[number] = request.trace.prompt_tokens + request.trace.output_tokens
        self.tenant[number] = self.tenants.index(request.tenant)
        if outcome is Outcome.FINISHED and request.first is not None:
            self.e2e[number] = now - request.at
            if request.trace.output_tokens > 1:
                self.tpot[number] = (now - request.first) / (request.trace.output_tokens - 1)
