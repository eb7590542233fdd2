"""The service: the asyncio shell that ties hub, clock and dispatcher together.

Life cycle: made without I/O, :meth:`Service.start` binds the hub and starts three tasks (receive, losses, tick),
:meth:`Service.generate` at will, :meth:`Service.close` fails what is open, tells the workers and leaves no task.
Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq.asyncio

from protocol.curve import CurveKeys
from protocol.errors import NoWorkerAvailable, ProtocolError, StartFailed
from protocol.ids import Peer
from protocol.loops import Loops
from protocol.messages import Message, Tokens
from protocol.sockets import Hub
from router.breaker import BreakerLimits, Breakers
from router.config import RouterConfig
from router.dispatcher import Dispatcher
from router.front.generation import EndReason, Generation, Outputs, ServiceHealth
from router.live_request import LiveRequest
from router.local_prefill import LocalPrefillRule
from router.metrics import RouterMetrics
from router.overview import ClusterOverview
from router.placer import Placer, PlacerConfig
from router.policy import first_turn
from router.registry import Worker, WorkerRegistry
from router.request_limits import RequestLimits
from router.slo.desk import Desk
from router.snapshot import (
    alerts_of,
    class_overviews,
    latencies,
    live_states,
    router_totals,
    unserved,
    worker_overview,
)
from router.span_metrics import OwnSpans

_log = logging.getLogger(__name__)

TICK = 0.1
"""Longest time between two looks at the clock, in seconds."""
SHORTEST_TICK = 0.005
BATCH = 64
"""Frames taken in before other tasks get their turn."""
FLUSH = 0.05
"""Seconds that closing leaves ZeroMQ's own thread to put the last cancels on the wire."""
LOG_INTERVAL = 1.0
"""Shortest time between two log lines about bad frames, in seconds."""


class Service:
    """Continues prompts on the cluster's workers; a ``router.front.generation.GenerationService``.

    Args:
        config: of this router.
        spans: gives what the router has counted of its own spans; None where it exports none.
    """

    def __init__(self, config: RouterConfig, spans: Callable[[], OwnSpans | None] = lambda: None) -> None:
        self._config = config
        self._registry = WorkerRegistry(config.worker_timeout, config.step_age_bound, config.forget_after)
        self._breakers = Breakers(
            BreakerLimits(
                failures=config.breaker_failures, window=config.breaker_window, cooldown=config.breaker_cooldown
            )
        )
        placing = PlacerConfig(
            model=config.model,
            policy=config.policy,
            local_prefill=LocalPrefillRule(config.local_prefill, config.local_prefill_tokens),
            slow_start=config.slow_start,
            explained_requests=config.explained_requests,
            first_turn=first_turn(config.name),
        )
        self._placer = Placer(placing, self._registry)
        self._metrics = RouterMetrics(
            self._registry.workers,
            lambda: len(self._dispatcher.live_requests),
            self._placer.index,
            self._placer.feeds,
            lambda worker: self._breakers.view(worker.peer),
            spans,
        )
        self._dispatcher = Dispatcher(
            model=config.model,
            placer=self._placer,
            limits=RequestLimits(
                max_attempts=config.max_attempts,
                worker_wait=config.worker_wait,
                worker_wait_first=config.worker_wait_first,
                retry_backoff=config.retry_backoff,
                reorder_grace=config.reorder_grace,
                stall_timeout=config.stall_timeout,
                lease_ttl=config.lease_ttl,
                request_timeout=config.request_timeout,
                priority_aging=config.priority_aging,
            ),
            desk=Desk(
                config.slo,
                self._placer,
                self._metrics.admission,
                max_requests=config.max_requests,
                ttft_target=config.ttft_target,
                aging=config.priority_aging,
            ),
            registry=self._registry,
            breakers=self._breakers,
            metrics=self._metrics,
            send=self._send,
        )
        self._context: zmq.asyncio.Context | None = None
        self._hub: Hub | None = None
        self._loops = Loops()
        self._serving = False
        self._started = time.monotonic()
        self._next_complaint = 0.0

    async def start(self) -> None:
        """Bind the hub and begin to listen.

        Raises:
            StartFailed: the hub's address cannot be bound.
        """
        context = zmq.asyncio.Context()
        try:
            hub = Hub(
                context,
                Peer(self._config.name, self._config.incarnation or time.time_ns()),
                self._config.hub,
                keys=CurveKeys.drawn_from(self._config.secret),
                watched=True,
            )
        except StartFailed:
            context.destroy(linger=0)
            raise
        self._context, self._hub, self._serving = context, hub, True
        self._started = time.monotonic()
        self._loops.start("router-receive", self._receive(hub))
        self._loops.start("router-losses", self._losses(hub))
        self._loops.start("router-tick", self._tick())

    async def close(self) -> None:
        """Fail what is open, tell the workers, end the tasks. A second call does nothing."""
        if not self._serving:
            return
        self._serving = False
        assert self._hub is not None
        assert self._context is not None
        failed = self._dispatcher.abandon_all(NoWorkerAvailable("the router is stopping"), time.monotonic())
        await self._loops.stop()
        if failed:
            await asyncio.sleep(FLUSH)
        self._hub.close()
        self._context.destroy(linger=0)
        self._hub = None

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        """The loops that must run for as long as it serves."""
        return self._loops.tasks

    @property
    def hub_endpoint(self) -> str:
        """Where workers connect to, with the port that was really taken."""
        assert self._hub is not None, "known once started"
        return self._hub.endpoint

    @property
    def model(self) -> str:
        """The served model's name."""
        return self._config.model

    @property
    def max_model_len(self) -> int | None:
        """The least of the live workers; None while there is none."""
        return min((worker.profile.max_model_len for worker in self._live_workers()), default=None)

    def generate(self, generation: Generation) -> Outputs:
        """Continue a prompt; leaving early cancels both legs. It is let in when the first output is asked for.

        Raises:
            InvalidRequest: it can never be served; names the field.
            Overloaded: too many requests are live.
            NoWorkerAvailable: no pair of workers is there to serve it.
            DeadlineExceeded: its time limit passed.
            AttemptsExhausted: every allowed attempt failed.
            KVFerryError: what a worker says no fresh attempt could mend.
        """

        def admit() -> LiveRequest:
            self._check_serving()
            return self._dispatcher.admit(generation, time.monotonic())

        return self._outputs(admit)

    @contextmanager
    def together(self, generations: Sequence[Generation]) -> Iterator[tuple[Outputs, ...]]:
        """Continue one prompt several times; see :meth:`GenerationService.together`."""
        self._check_serving()
        admitted = self._dispatcher.admit_together(generations, time.monotonic())
        try:
            yield tuple(self._outputs(_let_in(live)) for live in admitted)
        finally:
            # One whose outputs nobody began to read has nothing else that ends it.
            for live in admitted:
                self._dispatcher.cancel(live, time.monotonic())

    async def _outputs(self, admit: Callable[[], LiveRequest]) -> Outputs:
        live = admit()
        reason: EndReason | None = None
        try:
            while reason is None:
                output = await live.mailbox.take()
                reason = yield output
                reason = reason or output.finish_reason
        finally:
            self._dispatcher.cancel(live, time.monotonic(), reason)

    def _check_serving(self) -> None:
        if not self._serving:
            raise NoWorkerAvailable("the router is not running")

    def health(self) -> ServiceHealth:
        """Whether a new request would find a pair of workers."""
        roles = [worker.profile.role for worker in self._live_workers()]
        lack = self._lack(time.monotonic())
        return ServiceHealth(lack is None, roles.count("prefill"), roles.count("decode"), lack or "ready")

    def _lack(self, now: float) -> str | None:
        if not self._serving or any(task.done() for task in self.tasks):
            return "the router is not running"
        return self._dispatcher.can_place(now)

    def cluster(self) -> dict[str, Any]:
        """The workers' state and this router's own, a ``ClusterOverview`` ready for JSON; holds no address."""
        now = time.monotonic()
        workers = tuple(
            worker_overview(worker, self._breakers.view(worker.peer), now) for worker in self._registry.workers()
        )
        overview = ClusterOverview(
            model=self._config.model,
            router=self._config.name,
            policy=self._config.policy,
            live_requests=len(self._dispatcher.live_requests),
            max_model_len=self.max_model_len,
            uptime_s=round(now - self._started, 3),
            requests=live_states(self._dispatcher.live_requests),
            unserved=unserved(self._dispatcher.live_requests, self._metrics),
            classes=class_overviews(self._config.slo, self._metrics.admission),
            totals=router_totals(self._metrics),
            latency=latencies(self._metrics),
            alerts=alerts_of(workers, self._lack(now)),
            workers=workers,
        )
        told: dict[str, Any] = msgspec.to_builtins(overview)
        return told

    def explain(self, name: str) -> list[dict[str, Any]]:
        """Each placement of a client's request, ready for JSON; none when it is not known (any more)."""
        return [decision.told() for decision in self._placer.explanations.find(name)]

    def metrics(self) -> bytes:
        """All metrics in the Prometheus text format; may be called in any thread."""
        return self._metrics.exposition()

    def _live_workers(self) -> list[Worker]:
        return [
            worker for worker in self._registry.workers() if worker.live and worker.profile.model == self._config.model
        ]

    def _send(self, identity: bytes, message: Message) -> bool:
        return self._hub is not None and self._hub.send(identity, message)

    async def _receive(self, hub: Hub) -> None:
        while True:
            # A frame that is there already is handed over without a pause, so a flood would starve every other task.
            await asyncio.sleep(0)
            for _ in range(BATCH):
                try:
                    identity, envelope = await hub.receive()
                except ProtocolError as error:
                    self._complain(f"bad frame: {error.message}")
                    continue
                if hub.renewed:
                    self._dispatcher.renewed(identity, time.monotonic())
                if not self._dispatcher.receive(identity, envelope, time.monotonic()):
                    self._complain(
                        f"{envelope.sender} sent a {type(envelope.body).__name__}, which is not for a router"
                    )
                if isinstance(envelope.body, Tokens) and envelope.body.times is not None:
                    # A leg's first: who waits for it has it before more is taken in.
                    break

    async def _losses(self, hub: Hub) -> None:
        while True:
            self._dispatcher.disconnected(await hub.left(), time.monotonic())

    def _complain(self, what: str) -> None:
        self._metrics.bad_frames.inc()
        now = time.monotonic()
        if now >= self._next_complaint:
            self._next_complaint = now + LOG_INTERVAL
            _log.warning("%s", what)

    async def _tick(self) -> None:
        while True:
            now = time.monotonic()
            self._dispatcher.tick(now)
            await asyncio.sleep(min(TICK, max(SHORTEST_TICK, self._dispatcher.deadline - now)))


def _let_in(live: LiveRequest) -> Callable[[], LiveRequest]:
    return lambda: live
