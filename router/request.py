"""The life of one request over all its attempts: a pure state machine, the only writer of its state.

::

    QUEUED -> PREFILLING -> HANDOFF -> DECODING -> FINISHED
    any live state -> CANCELLED | FAILED
    PREFILLING | HANDOFF | DECODING -> QUEUED with attempt + 1, on an error that a fresh attempt may mend

Each event method takes ``now`` and returns instructions, to be carried out in order. A message of another attempt, or
from a worker (or an incarnation of it) that this attempt does not run on, changes nothing. A retry prefills the prompt
plus what was emitted, and ``Tokens.start`` tells what the client already has, so no token is emitted twice or lost.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from protocol.errors import (
    AttemptsExhausted,
    ContextLengthExceeded,
    DeadlineExceeded,
    IllegalTransition,
    KVFerryError,
    NoWorkerAvailable,
    Preempted,
    TransferError,
    WorkerDraining,
    WorkerLost,
)
from protocol.ids import Peer, RequestKey
from protocol.messages import MAX_TEXT, MAX_TOKENS, Failed, Prefill, PrefillAddress, PromptLogprobs, Reserve, Tokens
from router.admission import check_generation
from router.breaker import is_fault
from router.front.generation import Generation
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
from router.policy import Placement
from router.priority import seniority
from router.prompt_record import PromptRecord
from router.request_limits import RequestLimits
from router.request_table import REQUEST_TABLE, RequestEvent, RequestState
from router.timeline import Timeline

MAX_ATTEMPT = 1 << 16
"""Highest attempt number the wire can carry; only a request preempted without end gets there."""
MAX_BACKOFF = 1.0
"""Longest pause between two attempts, in seconds."""


class RequestMachine:
    """One request.

    Args:
        request_id: the router's own id.
        generation: what the client wants.
        limits: bounds on it.

    Raises:
        InvalidRequest: the workers could not even decode this; names the field.
    """

    def __init__(self, request_id: str, generation: Generation, limits: RequestLimits) -> None:
        check_generation(generation)
        own, most = generation.timeout, limits.request_timeout
        self.request_id = request_id
        self.attempt = 0
        self.placement: Placement | None = None
        self.timeline = Timeline()
        self._generation = generation
        self._limits = limits
        self._timeout = most if own is None else min(most, own)
        self._tracker = REQUEST_TABLE.start(request_id)
        self._emitted: list[int] = []
        self._record = PromptRecord(generation.prompt_logprobs, len(generation.token_ids))
        self._failures = 0
        self._setbacks = 0
        self._last_cause: KVFerryError | None = None
        self._excluded: frozenset[Peer] = frozenset()
        # Decode's tokens that overtook prefill's first one: they come over another connection.
        self._early: list[Tokens] = []
        self._expires_at = math.inf
        self._early_until = math.inf
        # Prefill's word that its ships failed: decode may have everything, and is given a moment to say so.
        self._doubt: tuple[Peer, KVFerryError] | None = None
        self._doubted_until = math.inf
        self._place_at = math.inf
        self._wait_until = math.inf
        self._stalls_at = math.inf

    @property
    def state(self) -> RequestState:
        """Where the request is."""
        return self._tracker.state

    @property
    def key(self) -> RequestKey:
        """Of the current attempt."""
        return RequestKey(self.request_id, self.attempt)

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self._tracker.final

    @property
    def emitted(self) -> int:
        """Tokens emitted so far."""
        return len(self._emitted)

    @property
    def prompt_tokens(self) -> int:
        """Tokens that this attempt prefills."""
        return len(self._generation.token_ids) + len(self._emitted)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What this attempt prefills: the prompt, and what earlier ones emitted."""
        return (*self._generation.token_ids, *self._emitted)

    @property
    def deadline(self) -> float:
        """When ``tick`` next has something to do."""
        soonest = min(self._expires_at, self._early_until, self._doubted_until)
        return min(soonest, self._place_at, self._wait_until, self._stalls_at)

    def submit(self, now: float) -> list[Instruction]:
        """The request is let in: its time begins to run."""
        self.timeline.submitted = now
        self._expires_at = now + self._timeout
        return [self._need_placement()]

    def placed(self, placement: Placement, now: float) -> list[Instruction]:
        """Workers were chosen: open both legs, prefill's first, for its token is what the client waits for."""
        self._tracker.move(RequestEvent.PLACED)
        self._wait_until = math.inf
        self.placement = placement
        generation, prefill, decode = self._generation, placement.prefill, placement.decode
        line = self.timeline
        line.placed = now if line.placed is None else line.placed
        line.decode = None
        line.prefill_worker, line.decode_worker = prefill.peer.name, "" if decode is None else decode.peer.name
        line.local_prefill = placement.local
        token_ids = self.token_ids
        senior = seniority(now - line.submitted, generation.priority, self._limits.priority_aging)
        reserved: list[Instruction] = []
        if decode is not None and not placement.local:
            reserve = Reserve(
                key=self.key,
                token_ids=token_ids,
                emitted=len(self._emitted),
                sampling=generation.sampling,
                prefill=PrefillAddress(peer=prefill.peer, endpoint=prefill.profile.peer_endpoint),
                lease_ttl=self._limits.lease_ttl,
                cache_salt=generation.cache_salt,
                seniority=senior,
                prefill_rate=prefill.prefill_rate,
            )
            reserved.append(SendReserve(decode.peer, reserve))
        message = Prefill(
            key=self.key,
            token_ids=token_ids,
            emitted=len(self._emitted),
            sampling=generation.sampling,
            handoff=None if decode is None else decode.peer,
            lease_ttl=self._limits.lease_ttl,
            cache_salt=generation.cache_salt,
            prompt_logprobs=self._record.wanted,
            prompt_logprobs_from=self._record.next,
            seniority=senior,
        )
        return [SendPrefill(prefill.peer, message), *reserved]

    def unplaced(self, error: NoWorkerAvailable, now: float) -> list[Instruction]:
        """There is no worker: wait for one to join, or fail."""
        if self._wait_until < math.inf:
            return []
        wait = self._limits.worker_wait if self.attempt else self._limits.worker_wait_first
        if wait <= 0:
            return self._fail(error)
        self._wait_until = now + wait
        return []

    def workers_changed(self, now: float) -> list[Instruction]:
        """A worker joined."""
        return [self._need_placement()] if self._wait_until < math.inf and not self.ended else []

    def prompt_told(self, sender: Peer, message: PromptLogprobs, now: float) -> list[Instruction]:
        """Log-probabilities of prompt tokens came; they go out with the first token."""
        if message.key != self.key or sender != self._legs()[0] or self.state is not RequestState.PREFILLING:
            return []
        if self._record.add(message.start, message.table):
            return []
        return self._gap(f"prompt tokens are told of from {message.start} on, not from {self._record.next}", now)

    def tokens(self, sender: Peer, message: Tokens, now: float) -> list[Instruction]:
        """Output tokens came."""
        prefill, decode = self._legs()
        if message.key != self.key or sender not in (prefill, decode):
            return []
        prefilling = self.state is RequestState.PREFILLING
        if sender != prefill and prefilling:
            self._early.append(message)
            self._early_until = min(self._early_until, now + self._limits.reorder_grace)
            return []
        if sender != decode and not prefilling:
            return []
        if prefilling and self._record.wanted is not None:
            return self._gap(f"the first token came, and prompt tokens were told of up to {self._record.next}", now)
        out = self._take(message, RequestEvent.PREFILLED if prefilling else RequestEvent.DECODED, now)
        if self.state is RequestState.PREFILLING:
            return out
        early, self._early, self._early_until = self._early, [], math.inf
        for held in early:
            if self.ended or held.key != self.key:
                break
            out += self._take(held, RequestEvent.DECODED, now)
        return out

    def failed(self, sender: Peer, message: Failed, now: float) -> list[Instruction]:
        """A leg gave up."""
        prefill, decode = self._legs()
        if message.key != self.key or sender not in (prefill, decode):
            return []
        if sender != decode and self.state is RequestState.DECODING:
            return []  # decode has taken over; whatever befell the lease afterwards is no longer this request's
        error = message.error.to_error()
        if sender != decode and self.state is RequestState.HANDOFF and isinstance(error, TransferError):
            self._doubt = (sender, error)
            self._doubted_until = min(self._doubted_until, now + self._limits.reorder_grace)
            return []
        return self._given_up(sender, error, now)

    def _given_up(self, sender: Peer, error: KVFerryError, now: float) -> list[Instruction]:
        prefill, decode = self._legs()
        # A transfer takes two; which of them is at fault, nobody can tell from here.
        culprits = {prefill, decode} if isinstance(error, TransferError) else {sender}
        blame = [Blame(frozenset(filter(None, culprits)), error)] if is_fault(error) else []
        return [*blame, *self._set_back(error, culprits, now, mendable=error.retryable)]

    def worker_lost(self, peer: Peer, reason: str, now: float) -> list[Instruction]:
        """A worker is gone."""
        prefill, decode = self._legs()
        if peer not in (prefill, decode) or (peer != decode and self.state is RequestState.DECODING):
            return []
        return self._set_back(WorkerLost(f"worker {peer.name} was lost: {reason}"), {peer}, now, mendable=True)

    def cancel(self, now: float, reason: str = "the client went away") -> list[Instruction]:
        """The client does not want the rest."""
        if self.ended:
            return []
        self._tracker.move(RequestEvent.CANCELLED)
        return self._close_legs(reason)

    def satisfied(self, now: float) -> list[Instruction]:
        """The client has all it wants, though more could come: a stop string was found, or the one call."""
        if self.ended:
            return []
        self._tracker.move(RequestEvent.COMPLETED)
        self.timeline.ended = now
        return self._close_legs("the client has all it wants", satisfied=True)

    def abandon(self, error: KVFerryError, now: float) -> list[Instruction]:
        """The service cannot go on with it."""
        return [] if self.ended else self._fail(error)

    def tick(self, now: float) -> list[Instruction]:
        """Time passed."""
        if self.ended:
            return []
        if now >= self._expires_at:
            return self._fail(DeadlineExceeded(f"the request did not finish within {self._timeout:g} s"))
        if now >= self._early_until:
            return self._gap("decode answered, but prefill's first token never came", now)
        if now >= self._doubted_until:
            assert self._doubt is not None, "a doubt has a time"
            return self._given_up(*self._doubt, now)
        if now >= self._wait_until:
            cause = "" if self._last_cause is None else f"; the last attempt failed: {self._last_cause.message}"
            return self._fail(NoWorkerAvailable(f"no worker became available in time{cause}"))
        if now >= self._stalls_at:
            return self._stalled(now)
        if now >= self._place_at:
            return [self._need_placement()]
        return []

    @property
    def _is_local(self) -> bool:
        return self.placement is not None and bool(self.placement.local)

    def _legs(self) -> tuple[Peer | None, Peer | None]:
        if self.placement is None:
            return None, None
        decode = self.placement.decode
        return self.placement.prefill.peer, None if decode is None else decode.peer

    def _need_placement(self) -> NeedPlacement:
        self._place_at = math.inf
        needs_decode = len(self._emitted) + 1 < self._generation.sampling.max_tokens
        return NeedPlacement(needs_decode, self._excluded)

    def _take(self, message: Tokens, event: RequestEvent, now: float) -> list[Instruction]:
        emitted, finish = len(self._emitted), message.finish_reason
        end = message.start + len(message.token_ids)
        if message.start > emitted:
            return self._gap(f"tokens begin at {message.start}, only {emitted} were emitted", now)
        if end < emitted or (end == emitted and finish is None):
            return []
        room = self._generation.sampling.max_tokens - emitted
        fresh = message.token_ids[emitted - message.start :][:room]
        logprobs = message.logprobs[emitted - message.start :][:room]
        if len(fresh) == room and (finish is None or end > emitted + room):
            finish = "length"
        self._emitted.extend(fresh)
        self._setbacks = 0
        stage = self._note(message, event, now)
        if finish is None:
            self._tracker.move(event)
            if event is RequestEvent.DECODED:
                self._doubt, self._doubted_until = None, math.inf
                self._stalls_at = now + self._limits.stall_timeout
            return [Emit(fresh, None, stage, logprobs, self._record.take())]
        self._tracker.move(RequestEvent.COMPLETED)
        self.timeline.ended = now
        out: list[Instruction] = [Emit(fresh, finish, stage, logprobs, self._record.take())]
        _, decode = self._legs()
        # Prefill ends with its one token, but only a decode leg that said itself that this is the end has ended.
        ended_itself = message.finish_reason is not None and (self._is_local or stage is not Stage.PREFILLED)
        if decode is not None and not ended_itself:
            out.append(SendCancel(decode, self.key, "the request has ended", satisfied=True))
        self.placement = None
        return out

    def _note(self, message: Tokens, event: RequestEvent, now: float) -> Stage:
        line = self.timeline
        if event is RequestEvent.PREFILLED:
            if line.first_token is None:
                line.first_token, line.prefill = now, message.times
            return Stage.PREFILLED
        line.decode = message.times or line.decode
        return Stage.DECODING if self.state is RequestState.DECODING else Stage.TAKEN_OVER

    def _gap(self, what: str, now: float) -> list[Instruction]:
        # Frames of one connection come in order, so some were lost with it; a fresh attempt makes them again.
        return self._set_back(IllegalTransition(f"request {self.key}: {what}"), set(), now, mendable=True)

    def _stalled(self, now: float) -> list[Instruction]:
        _, decode = self._legs()
        assert decode is not None, "only a decode worker's silence is timed"
        silent = WorkerLost(f"worker {decode.name} sent no token for {self._limits.stall_timeout:g} s")
        return [Blame(frozenset({decode}), silent), *self._set_back(silent, {decode}, now, mendable=True)]

    def _set_back(
        self, cause: KVFerryError, culprits: Collection[Peer | None], now: float, *, mendable: bool
    ) -> list[Instruction]:
        if not mendable:
            return self._fail(cause)
        self._failures += not isinstance(cause, Preempted | WorkerDraining)
        if self._failures >= self._limits.max_attempts or self.attempt == MAX_ATTEMPT:
            tried = f"{self.attempt + 1} attempts failed; the last with {cause.code}: {cause.message}"
            return self._fail(AttemptsExhausted(tried))
        out = self._close_legs(cause.message)
        self._tracker.move(RequestEvent.RETRIED)
        self.attempt += 1
        self._setbacks += 1
        self._last_cause = cause
        if not isinstance(cause, Preempted):
            self._excluded |= {peer for peer in culprits if peer is not None}
        out.append(Retry(cause, self.attempt))
        if self.prompt_tokens > MAX_TOKENS:
            too_long = ContextLengthExceeded(f"{self.prompt_tokens} tokens are over the bound of {MAX_TOKENS}")
            return [*out, *self._fail(too_long)]
        if self._setbacks == 1:
            return [*out, self._need_placement()]
        doublings = min(self._setbacks - 2, 20)
        self._place_at = now + min(MAX_BACKOFF, self._limits.retry_backoff * 2.0**doublings)
        return out

    def _fail(self, error: KVFerryError) -> list[Instruction]:
        self._tracker.move(RequestEvent.FAILED)
        return [*self._close_legs(error.message), Fail(error)]

    def _close_legs(self, reason: str, *, satisfied: bool = False) -> list[Instruction]:
        # Both are told, even one that reported the end itself: a cancel is idempotent, a leg left open is a leak.
        legs = dict.fromkeys(peer for peer in self._legs() if peer is not None)
        self.placement = None
        self._early, self._early_until = [], math.inf
        self._doubt, self._doubted_until = None, math.inf
        self._place_at = self._wait_until = self._stalls_at = math.inf
        return [SendCancel(peer, self.key, reason[:MAX_TEXT], satisfied) for peer in legs]
