"""The router's part of a request's trace: the request itself, what it waits for here, and each attempt.

Life cycle: a :class:`RequestTrace` is begun when a request comes in, and ended with its answer. Each of its choices has
a :class:`ChoiceTrace`, which sees what the request machine asks for, in order, and gives each attempt a span of its
own; the messages that open an attempt carry it to the workers. A further attempt is linked to the one that it follows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import msgspec

from protocol.errors import KVFerryError, RequestCancelled
from protocol.ids import RequestKey
from protocol.messages import Prefill, Reserve
from protocol.tracing import names
from router.explanations import Decision
from router.front.errors import status_of
from router.front.exchange import Exchange
from router.front.generation import EndReason
from router.front.plan import Plan
from router.front.schema import ChatRequest, CompletionRequest, GenerationRequest
from router.instructions import (
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
from router.timeline import Timeline

if TYPE_CHECKING:
    from protocol.tracing.tracer import Span, Tracer

M = TypeVar("M", Reserve, Prefill)

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
"""By path, as OpenTelemetry names them."""
MAX_PROMPT = 1 << 16
"""Characters of a prompt in a span at most, where it is put there."""


class ChoiceTrace:
    """One choice of a request, over all its attempts.

    Args:
        request: whose.
        index: of the choice.

    Attributes:
        tokens: given out.
        cached_tokens: of the prompt, found in a cache.
        finish_reason: that its client is told; None before its end.
    """

    def __init__(self, request: RequestTrace, index: int) -> None:
        self.tokens = 0
        self.cached_tokens = 0
        self.finish_reason: EndReason | None = None
        self._request = request
        self._index = index
        self._attempt: Span | None = None
        self._former: Span | None = None
        self._since: float | None = None
        self._asked: float | None = None

    def seen(
        self, key: RequestKey, timeline: Timeline, decision: Decision | None, instruction: Instruction, now: float
    ) -> Instruction:
        """What is to be done next for it; returned as it is to be done, with the span to go on from.

        Args:
            key: of the attempt.
            timeline: of the request.
            decision: why the attempt goes where it goes, once that is known.
            instruction: of the request machine.
            now: monotonic seconds.
        """
        match instruction:
            case NeedPlacement():
                # One event lets a request in, places it and opens its legs: its time does not pass meanwhile.
                self._asked = time.monotonic()
            case SendReserve(peer, message) if message.key == key:
                return SendReserve(peer, self._told(message, timeline, decision))
            case SendPrefill(peer, message) if message.key == key:
                return SendPrefill(peer, self._told(message, timeline, decision))
            case SendCancel(satisfied=True):
                # Its reader has all that it wants: it has finished, though its worker could go on.
                self._close(now)
            case Emit():
                self._emitted(instruction, key, timeline, decision, now)
            case Retry(cause):
                if self._attempt is not None:
                    self._attempt.fail(cause.code, cause.message)
                    self._former = self._attempt
                self._close(now)
                self._since = now
            case Fail(error):
                if self._attempt is not None:
                    self._attempt.fail(error.code, error.message)
                self._close(now)
        return instruction

    def end(self, now: float) -> None:
        """The answer is over; an attempt that is still open is not wanted any more."""
        if self._attempt is not None and self._attempt.recorded:
            self._attempt.add({names.CANCELLED: True})
        self._close(now)

    def _told(self, message: M, timeline: Timeline, decision: Decision | None) -> M:
        attempt = self._open(message.key, timeline, decision, time.monotonic())
        return msgspec.structs.replace(message, traceparent=attempt.traceparent)

    def _open(self, key: RequestKey, timeline: Timeline, decision: Decision | None, now: float) -> Span:
        """The span of the attempt; made when it is placed, from when it began to wait for that."""
        if self._attempt is not None:
            return self._attempt
        since = timeline.submitted if self._since is None else self._since
        about: dict[str, names.Value] = {
            names.KEY: str(key),
            names.ATTEMPT: key.attempt,
            names.CHOICE: self._index,
            names.PREFILL_WORKER: timeline.prefill_worker,
            names.DECODE_WORKER: timeline.decode_worker,
        }
        if timeline.local_prefill:
            about[names.LOCAL_PREFILL] = timeline.local_prefill
        made = self._request.span.child("attempt", since, about, link=self._former)
        # Choices of one prompt are placed together, when they come.
        together = now if key.attempt or timeline.placed is None else timeline.placed
        asked = together if self._asked is None else self._asked
        made.note("queue", since, asked)
        if decision is not None:
            made.note("route", asked, now, _predicted(decision))
        self._attempt, self._asked = made, None
        return made

    def _emitted(self, emit: Emit, key: RequestKey, timeline: Timeline, decision: Decision | None, now: float) -> None:
        attempt = self._open(key, timeline, decision, now)
        if emit.stage is Stage.PREFILLED:
            attempt.event("first_token", now)
            self._request.answered(now)
        elif emit.stage is Stage.TAKEN_OVER:
            attempt.event("taken_over", now)
        self.tokens += len(emit.token_ids)
        self.cached_tokens = 0 if timeline.prefill is None else timeline.prefill.cached_tokens
        if emit.finish_reason is not None:
            self._close(now)

    def _close(self, now: float) -> None:
        if self._attempt is not None:
            self._attempt.add({names.OUTPUT_TOKENS: self.tokens})
            self._attempt.end(now)
            self._attempt = None


class RequestTrace:
    """One request of a client.

    Args:
        span: of the request.
        begun: when it came (monotonic seconds).
        prompts: whether the prompt's text goes into it.

    Attributes:
        span: everything of this request hangs under it.
    """

    def __init__(self, span: Span, begun: float, *, prompts: bool) -> None:
        self.span = span
        self._begun = begun
        self._prompts = prompts
        self._first: float | None = None
        self._choices: list[ChoiceTrace] = []
        self._candidates = 1
        self._failed = False

    def planned(self, plan: Plan, begun: float) -> Plan:
        """What the request comes to is known, after work since ``begun``; returns the plan with its choices traced."""
        now = time.monotonic()
        self.span.note("tokenize", begun, now, {names.INPUT_TOKENS: plan.prompt_tokens})
        sampling = plan.generations[0].sampling
        self.span.add(
            {
                names.MAX_TOKENS: sampling.max_tokens,
                names.TEMPERATURE: sampling.temperature,
                names.TOP_P: sampling.top_p,
                names.TOP_K: sampling.top_k,
                names.SEED: sampling.seed,
                names.STREAM: plan.stream,
                names.CHOICE_COUNT: plan.kept,
                names.INPUT_TOKENS: plan.prompt_tokens,
            }
        )
        self._choices = [ChoiceTrace(self, index) for index in range(len(plan.generations))]
        self._candidates = plan.candidates
        pairs = zip(plan.generations, self._choices, strict=True)
        return replace(plan, generations=tuple(replace(each, trace=choice) for each, choice in pairs))

    def asked(self, request: GenerationRequest) -> None:
        """What the client has sent; its text is kept only where the configuration says so."""
        if self._prompts:
            self.span.add({names.INPUT_MESSAGES: _messages(request)[:MAX_PROMPT]})

    def answered(self, now: float) -> None:
        """A first token came."""
        if self._first is None:
            self._first = now
            self.span.add({names.FIRST_CHUNK: now - self._begun})

    def failed(self, error: KVFerryError) -> None:
        """The client gets an error; its text may repeat what the client sent, so only its code is told."""
        self._failed = True
        if isinstance(error, RequestCancelled):
            self.span.add({names.CANCELLED: True})
            self.span.fail(error.code, ours=False)
            return
        status = status_of(error)
        self.span.add({names.STATUS_CODE: status})
        self.span.fail(error.code, ours=status >= 500)

    def end(self, now: float) -> None:
        """The answer is out, or there is none."""
        for choice in self._choices:
            choice.end(now)
        if self._choices:
            leaders = self._choices[:: self._candidates]
            self.span.add(
                {
                    names.OUTPUT_TOKENS: sum(choice.tokens for choice in self._choices),
                    names.CACHED_TOKENS: sum(choice.cached_tokens for choice in leaders),
                }
            )
        if self._choices and not self._failed:
            reasons = [choice.finish_reason for choice in self._choices if choice.finish_reason is not None]
            self.span.add({names.FINISH_REASONS: reasons})
        self.span.end(now)


class RequestTraces:
    """Begins the traces of a front's requests.

    Args:
        tracer: of the process.
        model: served name.
    """

    def __init__(self, tracer: Tracer, model: str) -> None:
        self._tracer = tracer
        self._model = model

    @contextmanager
    def of(self, exchange: Exchange) -> Iterator[RequestTrace | None]:
        """Around the answering of a request; None where nobody will see its trace."""
        begun = time.monotonic()
        operation = OPERATIONS[exchange.path]
        about: names.Attributes = {
            names.OPERATION: operation,
            names.PROVIDER: "kvferry",
            names.REQUEST_MODEL: self._model,
            names.REQUEST_ID: exchange.request_id,
            names.METHOD: exchange.method,
            names.ROUTE: exchange.path,
        }
        span = self._tracer.enter(
            f"{operation} {self._model}",
            begun,
            about,
            traceparent=exchange.header(b"traceparent").decode("latin-1"),
            tracestate=exchange.header(b"tracestate").decode("latin-1"),
        )
        if not span.recorded:
            yield None
            return
        trace = RequestTrace(span, begun, prompts=self._tracer.prompts)
        try:
            yield trace
            span.add({names.STATUS_CODE: 200, names.RESPONSE_MODEL: self._model})
        except KVFerryError as error:
            trace.failed(error)
            raise
        except Exception:
            trace.failed(KVFerryError("internal error"))
            raise
        finally:
            trace.end(time.monotonic())


def _messages(request: GenerationRequest) -> str:
    """A prompt as OpenTelemetry writes one: JSON of turns in parts."""
    told: list[dict[str, object]] = []
    if isinstance(request, ChatRequest):
        for message in request.messages:
            content = message.content or ""
            texts = [content] if isinstance(content, str) else [part.text or "" for part in content]
            told.append({"role": message.role, "parts": [{"type": "text", "content": text} for text in texts]})
    elif isinstance(request, CompletionRequest):
        told.append({"role": "user", "parts": [{"type": "text", "content": request.prompt}]})
    return msgspec.json.encode(told).decode()


def _predicted(decision: Decision) -> dict[str, names.Value]:
    told: dict[str, names.Value] = {
        names.POLICY: decision.policy,
        names.PREDICTED_TTFT: decision.predicted_ttft,
        names.PREDICTED_CACHED: decision.cached_tokens,
    }
    if decision.predicted_tpot is not None:
        told[names.PREDICTED_TPOT] = decision.predicted_tpot
    return told
