"""Carries out what the request machines ask for. No asyncio task, no wait: events in, frames and outputs out.

Life cycle of a request here: admitted, advanced by each event that concerns it, and dropped in the moment its machine
has ended; only its mailbox stays with the reader.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ParamSpec

from protocol.errors import InvariantViolation, KVFerryError, NoWorkerAvailable, TargetOutOfReach
from protocol.ids import Peer, RequestKey
from protocol.kv_events import KVEvents, KVFollow, KVSnapshot
from protocol.messages import (
    Cancel,
    Envelope,
    Failed,
    Heartbeat,
    Message,
    Prefill,
    PromptLogprobs,
    Reserve,
    Tokens,
)
from router.breaker import Breakers
from router.forks import check_alike, fold
from router.front.generation import EndReason, Generation, GenerationReport
from router.instructions import (
    Blame,
    Emit,
    Fail,
    Instruction,
    NeedPlacement,
    Retry,
    SendCancel,
    SendPrefill,
    SendReserve,
    Stage,
)
from router.live_request import LiveRequest
from router.metrics import RouterMetrics
from router.pairing import complaints
from router.placer import Placer
from router.policy import Demand, Placement
from router.prompt_chain import PromptChains
from router.registry import WorkerEvent, WorkerJoined, WorkerRegistry
from router.request_limits import RequestLimits
from router.request_table import RequestState
from router.slo.admission import Admit
from router.slo.desk import Desk

_log = logging.getLogger(__name__)
P = ParamSpec("P")


class Dispatcher:
    """All live requests of one router.

    Args:
        model: served name.
        placer: chooses the workers.
        limits: on each request.
        desk: lets requests in.
        registry: of the workers.
        breakers: of the workers.
        metrics: counts what happens.
        send: queues a message for a worker by its hub identity; False when it cannot be reached.
    """

    def __init__(
        self,
        *,
        model: str,
        placer: Placer,
        limits: RequestLimits,
        desk: Desk,
        registry: WorkerRegistry,
        breakers: Breakers,
        metrics: RouterMetrics,
        send: Callable[[bytes, Message], bool],
    ) -> None:
        self._model = model
        self._placer = placer
        self._limits = limits
        self._desk = desk
        self._registry = registry
        self._breakers = breakers
        self._metrics = metrics
        self._send = send
        self._live: dict[str, LiveRequest] = {}
        self._turn = placer.first_turn
        self._work: deque[tuple[LiveRequest, Instruction]] = deque()
        self._working = False
        # Of all requests; a token moves its own on and leaves this, so that thousands of streams cost no more than one.
        self._deadline = float("inf")

    @property
    def live_requests(self) -> Collection[LiveRequest]:
        """The requests that are under way."""
        return self._live.values()

    @property
    def deadline(self) -> float:
        """Before that ``tick`` has nothing to do for any request; infinite when there is none."""
        return self._deadline

    def admit(self, generation: Generation, now: float) -> LiveRequest:
        """Let a request in and start its first attempt.

        Raises:
            InvalidRequest: it can never be served; names the field.
            Overloaded: too many requests are live.
        """
        return self.admit_together((generation,), now)[0]

    def admit_together(self, generations: Sequence[Generation], now: float) -> list[LiveRequest]:
        """Let in requests that continue one prompt, and start their first attempts as one: one prefill, one handoff.

        From then on each goes its own way. Where there are no workers to start on, each waits, and starts, by itself.

        Raises:
            InvalidRequest: they can never be served; names the field.
            Overloaded: too many requests are live; none was let in.
            InvariantViolation: they differ in more than the seed.
        """
        check_alike(generations)
        together = self._let_in(generations)
        wishes = [wish for live in together for wish in live.machine.submit(now) if isinstance(wish, NeedPlacement)]
        for live in together:
            self._note_deadline(live)
        self._desk.arrive(together, wishes[0], now)
        self._let_on(now)
        return together

    def _let_on(self, now: float) -> None:
        """Start those whose turn it is, and refuse those whose turn would come too late."""
        for step in self._desk.steps(now):
            group = step.ticket.payload
            if isinstance(step, Admit):
                self._place(group.open, group.wish, now, step.full)
            else:
                self._refuse(group.open, step.error, now)

    def _refuse(self, group: list[LiveRequest], error: KVFerryError, now: float) -> None:
        for live in group:
            self._advance(live, live.machine.abandon(error, now), now)

    def _let_in(self, generations: Sequence[Generation]) -> list[LiveRequest]:
        self._desk.check_room(len(self._live), generations)
        fresh = [LiveRequest.of(each, self._limits) for each in generations]
        for each, generation in zip(fresh, generations, strict=True):
            self._live[each.machine.request_id] = each
            self._metrics.prompt_tokens.inc(len(generation.token_ids))
        return fresh

    def cancel(self, live: LiveRequest, now: float, reason: EndReason | None = None) -> None:
        """The reader left, or for a ``reason`` has all it wants; nothing happens when the request has ended."""
        if (machine := live.machine).ended:
            return
        if reason is None:
            self._metrics.cancelled(machine.timeline, machine.emitted, now)
            self._advance(live, machine.cancel(now), now)
        else:
            self._metrics.finished(reason, machine.timeline, machine.emitted, now)
            self._advance(live, machine.satisfied(now), now)

    def abandon_all(self, error: KVFerryError, now: float) -> int:
        """Fail every live request; returns how many there were."""
        everything = list(self._live.values())
        self._refuse(everything, error, now)
        return len(everything)

    def receive(self, identity: bytes, envelope: Envelope, now: float) -> bool:
        """Take in one message from a worker; False when workers have no business sending it."""
        match envelope.body:
            case Heartbeat() as beat:
                self._desk.stirred = True
                told = self._registry.heartbeat(envelope.sender, identity, beat, now, envelope.speaks)
                self._workers_changed(told, now)
                self._follow(identity, self._placer.heartbeat(envelope.sender, beat.kv_sequence, now))
            case KVEvents() | KVSnapshot():
                self._follow(identity, self._placer.told(envelope.sender, envelope.body, now))
            case PromptLogprobs() as told:
                live = self._current(identity, told.key, leg_goes_on=True)
                if live is not None:
                    self._guarded(live, now, live.machine.prompt_told, envelope.sender, told, now)
            case Tokens() as tokens:
                live = self._current(identity, tokens.key, leg_goes_on=tokens.finish_reason is None)
                if live is not None:
                    self._guarded(live, now, live.machine.tokens, envelope.sender, tokens, now)
            case Failed() as failed:
                live = self._current(identity, failed.key, leg_goes_on=False)
                if live is not None:
                    self._guarded(live, now, live.machine.failed, envelope.sender, failed, now)
            case _:
                return False
        if self._desk.stirred:
            self._let_on(now)
        return True

    def renewed(self, identity: bytes, now: float) -> None:
        """A worker has a new connection in place of another one; what comes after this comes over it."""
        self._workers_changed(self._registry.renewed(identity), now)

    def disconnected(self, identity: bytes, now: float) -> None:
        """A worker's connection has ended."""
        self._registry.disconnected(identity, now)

    def tick(self, now: float) -> None:
        """Time passed."""
        self._workers_changed(self._registry.tick(now), now)
        self._desk.tick(now)
        self._let_on(now)
        if now < self._deadline:
            return
        self._deadline = float("inf")
        for live in list(self._live.values()):
            if live.machine.deadline <= now:
                self._guarded(live, now, live.machine.tick, now)
            self._note_deadline(live)

    def can_place(self, now: float) -> str | None:
        """Why a new request would find no pair of workers, or None when it would find one."""
        try:
            self._placer.look(PromptChains(), Demand(needs_decode=True), now)
        except NoWorkerAvailable as error:
            return error.message
        return None

    def _follow(self, identity: bytes, message: KVFollow | None) -> None:
        if message is not None:
            self._send(identity, message)

    def _current(self, identity: bytes, key: RequestKey, *, leg_goes_on: bool) -> LiveRequest | None:
        live = self._live.get(key.request_id)
        if live is not None and live.machine.key == key:
            return live
        self._metrics.late_messages.inc()
        if leg_goes_on:
            # Its cancel was lost, or it works for an earlier life of this router: nobody else would ever stop it.
            self._send(identity, Cancel(key=key, reason="this attempt is over"))
        return None

    def _workers_changed(self, events: Iterable[WorkerEvent], now: float) -> None:
        for event in events:
            _log.info("%s", event)
            everything = list(self._live.values())
            if isinstance(event, WorkerJoined):
                if not event.returned:
                    for complaint in complaints(event.peer, self._registry.workers(), self._model):
                        _log.warning("%s", complaint)
                self._breakers.keep(worker.peer.name for worker in self._registry.workers())
                for live in everything:
                    self._advance(live, live.machine.workers_changed(now), now)
            else:
                # Once, however many requests it had: those of a machine that was restarted say nothing about the next.
                self._blame(frozenset({event.peer}), event.reason, now)
                for live in everything:
                    self._advance(live, live.machine.worker_lost(event.peer, event.reason, now), now)

    def _guarded(
        self, live: LiveRequest, now: float, event: Callable[P, list[Instruction]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        try:
            instructions = event(*args, **kwargs)
        except InvariantViolation as error:
            _log.exception("request %s", live.machine.key)
            instructions = live.machine.abandon(error, now)
        self._advance(live, instructions, now)

    def _advance(self, live: LiveRequest, instructions: Iterable[Instruction], now: float) -> None:
        if live.machine.ended:
            self._forget(live, now)
        self._note_deadline(live)
        self._work.extend((live, instruction) for instruction in instructions)
        if self._working:
            return  # the loop below is running further up the stack and will come to these
        self._working = True
        try:
            while self._work:
                target, instruction = self._work.popleft()
                self._perform(target, instruction, now)
        finally:
            self._working = False

    def _perform(self, live: LiveRequest, instruction: Instruction, now: float) -> None:
        machine, name = live.machine, live.generation.name
        match live.seen(instruction, now):
            case Emit() as instruction:
                self._emit(live, instruction, now)
            case NeedPlacement() as instruction:
                if machine.state is RequestState.QUEUED:
                    self._place([live], instruction, now)
            case SendReserve(peer, message) | SendPrefill(peer, message):
                # An attempt that ended while its messages waited here is not opened any more.
                if machine.key == message.key and not machine.ended and not self._send_to(peer, message):
                    self._workers_changed(self._registry.unreachable(peer), now)
                    for each in (live, *self._carried_by(message)):
                        self._advance(each, each.machine.worker_lost(peer, "it cannot be reached", now), now)
            case SendCancel(peer, key, reason, satisfied):
                self._send_to(peer, Cancel(key=key, reason=reason, satisfied=satisfied))
            case Blame(peers, cause):
                self._blame(peers, cause.message, now)
            case Retry(cause, attempt):
                live.over(self._placer, now)
                self._metrics.retries.labels(cause.code).inc()
                _log.info("request %s (%s): attempt %d follows: %s", machine.key, name, attempt, cause.message)
            case Fail(error):
                live.mailbox.fail(error)
                self._metrics.ended("failed", error.code)
                _log.warning("request %s (%s) failed: %s: %s", machine.key, name, error.code, error.message)

    def _carried_by(self, message: Reserve | Prefill) -> list[LiveRequest]:
        found = [(self._live.get(fork.key.request_id), fork.key) for fork in message.forks]
        return [live for live, key in found if live is not None and live.machine.key == key]

    def _send_to(self, peer: Peer, message: Message) -> bool:
        worker = self._registry.find(peer)
        return worker is not None and self._send(worker.identity, message)

    def _place(
        self, group: list[LiveRequest], wish: NeedPlacement, now: float, full: frozenset[Peer] = frozenset()
    ) -> None:
        """Start requests as one; where there are no workers each waits, and starts, by itself."""
        if not group:
            return
        try:
            placement = self._choose(group, wish, now, full)
        except NoWorkerAvailable as error:
            for live in group:
                self._advance(live, live.machine.unplaced(error, now), now)
            return
        except TargetOutOfReach as error:
            self._desk.unplaced(group)
            self._refuse(group, error, now)
            return
        for live in group:
            live.placement = placement
        self._advance(group[0], fold([live.machine.placed(placement, now) for live in group]), now)
        for live in group[1:]:
            self._note_deadline(live)

    def _choose(self, group: list[LiveRequest], wish: NeedPlacement, now: float, full: frozenset[Peer]) -> Placement:
        live, barred, left = group[0], self._breakers.barred(now), self._desk.left(group[0], now)
        demand = live.demand(wish, turn=self._turn, ttft_target=left, full=full, barred=barred, sequences=len(group))
        placement, decision = self._placer.place(live.chains, demand, live.machine.key, now)
        self._placer.explanations.keep(live.generation.name or live.machine.request_id, decision)
        self._desk.placed(group, decision)
        for each in group:
            each.decided(decision)
        self._turn += 1
        for peer in placement.peers:
            self._breakers.chosen(peer, now)
        return placement

    def _blame(self, peers: frozenset[Peer], reason: str, now: float) -> None:
        for peer in self._breakers.failed(peers, reason, now):
            _log.warning("worker %s gets no new work while another is there: %s", peer, reason)

    def _credit(self, placement: Placement | None, stage: Stage, now: float) -> None:
        """Both legs have done their part once decode has taken over; prefill alone where it is the only one."""
        if placement is None or (stage is Stage.PREFILLED) != (placement.decode is None):
            return
        for peer in placement.peers:
            if self._breakers.answered(peer, now):
                _log.info("worker %s serves again", peer)

    def _emit(self, live: LiveRequest, emit: Emit, now: float) -> None:
        machine, metrics = live.machine, self._metrics
        report: GenerationReport | None = None
        if emit.stage is not Stage.DECODING or emit.finish_reason is not None:
            report = machine.timeline.report(machine.request_id, machine.attempt + 1, now)
            metrics.reached(emit.stage, report, first=not live.answered)
            if emit.stage is Stage.PREFILLED and live.decision is not None:
                self._desk.stirred = True
                metrics.foretold(live.decision, self._placer.first_token(live.decision, now))
            elif emit.stage is Stage.TAKEN_OVER and live.decision is not None:
                self._placer.taken_over(live.decision, report.kv_bytes, report.ship_s, now)
            live.answered = True
            self._credit(live.placement, emit.stage, now)
        live.mailbox.put(emit.token_ids, emit.finish_reason, report, emit.logprobs, emit.prompt_logprobs)
        metrics.output_tokens.inc(len(emit.token_ids))
        if emit.finish_reason is not None:
            metrics.finished(emit.finish_reason, machine.timeline, machine.emitted, now)

    def _note_deadline(self, live: LiveRequest) -> None:
        if not live.machine.ended:
            self._deadline = min(self._deadline, live.machine.deadline)

    def _forget(self, live: LiveRequest, now: float) -> None:
        machine = live.machine
        if self._live.pop(machine.request_id, None) is None:
            return
        self._desk.forget(live)
        if live.decision is not None:
            self._placer.ended(live.decision, machine.emitted, now)
        live.over(self._placer, now, computed=machine.timeline.first_token is not None)
