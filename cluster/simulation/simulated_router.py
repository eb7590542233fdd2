"""A router: the real registry, placer, feeds, breakers and admission, told of what simulated workers send.

Life cycle of a request here: arrived, let in, placed, first token, decoding, ended; after the loss of a worker that it
needs it is placed again, with its prompt and the tokens that have come, as the request machine does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from cluster.simulation.agenda import Agenda
from cluster.simulation.job import Job
from cluster.simulation.prompt import SimulatedPrompt
from cluster.simulation.record import Outcome, Records, Request
from cluster.simulation.simulated_worker import MODEL
from protocol.errors import NoWorkerAvailable, TargetOutOfReach
from protocol.ids import Peer, RequestKey
from protocol.kv_events import KVEvents, KVFollow, KVSnapshot
from protocol.messages import Heartbeat, Message
from router.breaker import BreakerLimits, Breakers
from router.config import RouterConfig
from router.local_prefill import LocalPrefillRule
from router.placer import Placer, PlacerConfig
from router.policy import Demand, Placement, first_turn
from router.registry import WorkerEvent, WorkerJoined, WorkerRegistry
from router.slo.admission import Admission, Admit
from router.slo.ticket import Ticket, TicketState

MOST = 1 << 16
"""Output tokens that clients ask for at most: how long an answer will be, no router knows."""
TICK = 0.1
"""Seconds between two looks at who has fallen silent."""

Open = Callable[[Request, SimulatedPrompt, Placement], Job]
Close = Callable[[Job], int]
Send = Callable[[Peer, Peer, KVFollow], None]


class SimulatedRouter:
    """One router.

    Args:
        name: of it.
        config: settings of a real one; the simulated ones heed those about placement and waiting.
        agenda: of the run.
        records: of all requests.
        send: sends a worker a message.
        open_job: sends a job to the workers of a placement.
        close_job: calls it back; returns how many tokens have come of it after the first.
    """

    def __init__(
        self,
        name: str,
        config: RouterConfig,
        agenda: Agenda,
        records: Records,
        send: Send,
        open_job: Open,
        close_job: Close,
    ) -> None:
        self.peer = Peer(name, 1)
        self._config = config
        self._agenda = agenda
        self._records = records
        self._send = send
        self._open = open_job
        self._close = close_job
        self._registry = WorkerRegistry(config.worker_timeout, config.step_age_bound, config.forget_after)
        placing = PlacerConfig(
            MODEL,
            config.policy,
            LocalPrefillRule(config.local_prefill, config.local_prefill_tokens),
            slow_start=config.slow_start,
            explained_requests=config.explained_requests,
            first_turn=first_turn(name),
        )
        self.placer = Placer(placing, self._registry)
        self._breakers = Breakers(
            BreakerLimits(
                failures=config.breaker_failures, window=config.breaker_window, cooldown=config.breaker_cooldown
            )
        )
        self._live: dict[int, Request] = {}
        self._waiting: dict[int, Request] = {}
        self._admission: Admission[Ticket[Request]] = Admission(config.slo, self.placer, config.priority_aging)
        self._turn = self.placer.first_turn

    def queue(self) -> list[Request]:
        """Requests that wait here, for their turn or for workers."""
        for_turn = (
            each
            for each in self._live.values()
            if each.ticket is not None and each.ticket.state is TicketState.WAITING and not each.ticket.patient
        )
        return [*for_turn, *self._waiting.values()]

    def tick(self) -> None:
        """Look who has fallen silent, and again and again."""
        now = self._agenda.now
        self._workers_changed(self._registry.tick(now))
        for request in [each for each in self._waiting.values() if each.wait_until <= now]:
            self._end(request, Outcome.FAILED)
        for refused in self._admission.overdue(now):
            self._end(refused.ticket.payload, Outcome.REFUSED)
        self._let_on()
        self._agenda.after(TICK, self.tick)

    def hear(self, sender: Peer, message: Message) -> None:
        """A worker's message has come."""
        now = self._agenda.now
        answer: KVFollow | None = None
        match message:
            case Heartbeat():
                self._workers_changed(self._registry.heartbeat(sender, sender.name.encode(), message, now))
                answer = self.placer.heartbeat(sender, message.kv_sequence, now)
                self._let_on()
            case KVEvents() | KVSnapshot():
                answer = self.placer.told(sender, message, now)
        if answer is not None:
            self._send(self.peer, sender, answer)

    def disconnected(self, peer: Peer) -> None:
        """A worker's connection has ended."""
        self._registry.disconnected(peer.name.encode(), self._agenda.now)

    def arrive(self, request: Request) -> None:
        """A client asks."""
        self._live[request.number] = request
        if len(self._live) > self._config.max_requests:
            self._end(request, Outcome.REFUSED)
        elif self._config.slo.active:
            self._wait_for_turn(request)
        else:
            self._place(request)

    def first_token(self, job: Job) -> None:
        """Prefill's token has come."""
        request, now = job.request, self._agenda.now
        if request.job is not job:
            return
        if request.decision is not None:
            self.placer.first_token(request.decision, now)
        if request.first is None:
            self._records.first_token(request, now)
        if job.decode is None:
            self._answered(job)
            self._end(request, Outcome.FINISHED)
        self._let_on()

    def taken_over(self, job: Job) -> None:
        """Decode's first token has come."""
        if job.request.job is job and job.request.decision is not None:
            self.placer.taken_over(job.request.decision, job.nbytes, job.crossed, self._agenda.now)

    def last_token(self, job: Job) -> None:
        """Decode has come to its end."""
        request, now = job.request, self._agenda.now
        if request.job is not job:
            return
        self._answered(job)
        if request.decision is not None:
            self.placer.ended(request.decision, request.trace.output_tokens, now)
        self._end(request, Outcome.FINISHED)
        self._let_on()

    def _answered(self, job: Job) -> None:
        for worker in (job.prefill, job.decode):
            if worker is not None:
                self._breakers.answered(worker.peer, self._agenda.now)

    def _wait_for_turn(self, request: Request) -> None:
        now, trace, slo = self._agenda.now, request.trace, self._config.slo.of("")
        request.ticket = Ticket(
            payload=request,
            slo=slo,
            tenant=request.tenant,
            prompt=request.prompt.length,
            most=1 if trace.output_tokens == 1 else MOST,
            arrived=now,
            ttft=slo.ttft or math.inf,
            limit=slo.deadline or math.inf,
        )
        demand = self._demand(request, request.prompt, frozenset())
        for refused in self._admission.arrive(request.ticket, request.prompt, demand, now):
            self._end(refused.ticket.payload, Outcome.REFUSED)
        self._let_on()

    def _let_on(self) -> None:
        while (step := self._admission.next(self._agenda.now)) is not None:
            request = step.ticket.payload
            if isinstance(step, Admit):
                self._place(request, step.full)
            else:
                self._end(request, Outcome.REFUSED)

    def _demand(self, request: Request, prompt: SimulatedPrompt, full: frozenset[Peer]) -> Demand:
        now, trace, ticket = self._agenda.now, request.trace, request.ticket
        target = self._config.ttft_target
        if ticket is not None:
            target = max(ticket.bound - (now - ticket.arrived), 1e-9) if math.isfinite(ticket.bound) else 0.0
        output = trace.output_tokens - request.emitted
        return Demand(
            needs_decode=output > 1,
            excluded=request.excluded | full,
            turn=self._turn,
            prompt_tokens=prompt.length,
            output=output,
            session=str(trace.session),
            ttft_target=0.0 if request.attempt else target,
            barred=self._breakers.barred(now),
            reserve=0.0 if request.attempt or ticket is None else ticket.tokens,
        )

    def _place(self, request: Request, full: frozenset[Peer] = frozenset()) -> None:
        now, ticket = self._agenda.now, request.ticket
        prompt = request.prompt.with_answer(request.emitted) if request.emitted else request.prompt
        key = RequestKey(f"r{request.number}", request.attempt)
        try:
            placement, decision = self.placer.place(prompt, self._demand(request, prompt, full), key, now)
        except TargetOutOfReach:
            if ticket is not None:
                self._admission.unplaced(ticket)
            self._end(request, Outcome.REFUSED)
            return
        except NoWorkerAvailable:
            self._wait(request)
            return
        if ticket is not None and not request.attempt:
            self._admission.placed(ticket, decision.prompt_tokens - decision.cached_tokens)
        self._turn += 1
        self._waiting.pop(request.number, None)
        self.placer.explanations.keep(key.request_id, decision)
        for peer in placement.peers:
            self._breakers.chosen(peer, now)
        request.decision = decision
        request.job = self._open(request, prompt, placement)

    def _wait(self, request: Request) -> None:
        if request.number not in self._waiting:
            wait = self._config.worker_wait if request.attempt else self._config.worker_wait_first
            if wait <= 0:
                self._end(request, Outcome.FAILED)
                return
            request.wait_until = self._agenda.now + wait
            self._waiting[request.number] = request

    def _workers_changed(self, events: Iterable[WorkerEvent]) -> None:
        for event in events:
            if isinstance(event, WorkerJoined):
                for request in list(self._waiting.values()):
                    self._place(request)
                continue
            self._breakers.failed(frozenset({event.peer}), event.reason, self._agenda.now)
            for request in list(self._live.values()):
                if request.job is not None and _needs(request.job, event.peer):
                    self._again(request, event.peer)

    def _again(self, request: Request, lost: Peer) -> None:
        self._release(request)
        job = request.job
        assert job is not None, "it was placed"
        came = self._close(job)
        # Its first token may have been on the way, and is not counted then.
        request.emitted += came + 1 if request.first is not None and job.first is not None else 0
        request.job = None
        request.attempt += 1
        request.excluded |= {lost}
        self._records.retries += 1
        if request.attempt >= self._config.max_attempts:
            self._end(request, Outcome.FAILED)
        elif request.emitted >= request.trace.output_tokens:
            self._end(request, Outcome.FINISHED)
        else:
            self._place(request)

    def _end(self, request: Request, outcome: Outcome) -> None:
        self._live.pop(request.number, None)
        self._waiting.pop(request.number, None)
        self._release(request)
        if request.ticket is not None:
            finished = outcome is Outcome.FINISHED
            output = request.trace.output_tokens if finished else request.emitted
            self._admission.ended(request.ticket, output, (output,) if finished else ())
        self._records.end(request, outcome, self._agenda.now)

    def _release(self, request: Request) -> None:
        decision, request.decision = request.decision, None
        if decision is not None:
            self.placer.release(decision, self._agenda.now, computed=False)


def _needs(job: Job, peer: Peer) -> bool:
    """Once the sequence runs, prefill's loss is nothing to it."""
    if job.decode is not None and job.decode.peer == peer:
        return True
    return job.prefill.peer == peer and job.joined < 0
