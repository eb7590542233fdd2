"""What the client gives back, and how it is read from the router's JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from protocol.errors import ERRORS_BY_CODE, KVFerryError, MalformedFrame, error_from_code
from router.client.calls import ToolCall, ToolCallDelta, WrittenCall, joined_calls
from router.client.scores import ChoiceLogprobs, PromptLogprobs, RankedToken, ScoredToken, Tokenization
from router.front.generation import GenerationReport

T = TypeVar("T")

Timings = GenerationReport
"""Durations and counts of one generation, as the router reports them."""

MAX_EXCERPT = 200
"""Characters of an answer that is not ours, shown in an error."""

CODES_BY_STATUS = {
    404: "invalid_request",
    413: "payload_too_large",
    415: "unsupported_media_type",
    429: "overloaded",
    503: "no_worker_available",
    504: "deadline_exceeded",
}
"""Error codes for answers that do not carry one, as from a proxy on the way."""


@dataclass(frozen=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class Completion:
    """One finished answer.

    Attributes:
        text: of the first choice.
        finish_reason: "stop", "length" or "tool_calls".
        usage: None where the router gave none.
        timings: None unless they were asked for.
        request_id: the router's own id.
        choices: the text of each choice, the first included.
        logprobs: of the first choice's tokens, where they were asked for; with ``echo`` the prompt's come before.
        prompt_logprobs: of its prompt's tokens, where they were asked for.
        tool_calls: of the first choice.
    """

    text: str
    finish_reason: str | None
    usage: Usage | None = None
    timings: Timings | None = None
    request_id: str = ""
    choices: tuple[str, ...] = ()
    logprobs: tuple[ScoredToken, ...] = ()
    prompt_logprobs: PromptLogprobs = ()
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Chunk:
    """The next piece of a stream.

    ``finish_reason`` comes with the last text, usage and timings at the end; calls of tools come piece by piece.
    """

    text: str
    finish_reason: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    index: int = 0
    logprobs: tuple[ScoredToken, ...] = ()
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True)
class ModelCard:
    """A served model."""

    id: str
    owned_by: str = ""
    max_model_len: int | None = None


@dataclass(frozen=True)
class Health:
    """What ``/health`` says."""

    ready: bool
    prefill_workers: int
    decode_workers: int
    detail: str = ""


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _Details | None = None

    def to_usage(self) -> Usage:
        details = self.prompt_tokens_details or _Details()
        return Usage(self.prompt_tokens, self.completion_tokens, self.total_tokens, details.cached_tokens)


class _Content(msgspec.Struct):
    content: str | None = None
    tool_calls: list[WrittenCall] = []


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    message: _Content | None = None
    delta: _Content | None = None
    finish_reason: str | None = None
    logprobs: ChoiceLogprobs | None = None
    prompt_logprobs: list[dict[int, RankedToken] | None] | None = None

    def scored(self) -> tuple[ScoredToken, ...]:
        return () if self.logprobs is None else self.logprobs.to_tokens()

    def written(self) -> str:
        part = self.message or self.delta
        return (self.text if part is None else part.content) or ""

    def called(self) -> list[WrittenCall]:
        return (self.message or self.delta or _Content()).tool_calls


class _Error(msgspec.Struct):
    message: str = ""
    code: str | None = None
    param: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    kvferry: GenerationReport | list[GenerationReport | None] | None = None
    error: _Error | None = None
    prompt_logprobs: list[dict[int, RankedToken] | None] | None = None

    def timings(self) -> Timings | None:
        if isinstance(self.kvferry, list):
            return next((report for report in self.kvferry if report is not None), None)
        return self.kvferry


class _Models(msgspec.Struct):
    data: list[ModelCard]


class _Text(msgspec.Struct):
    prompt: str


def decoded(data: bytes | str, kind: type[T], fault: str = "the router's answer does not decode") -> T:
    """What the router says, as ``kind``.

    Raises:
        MalformedFrame: it is something else; begins with ``fault``.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedFrame(f"{fault}: {error}") from error


def completion_of(body: bytes, request_id: str) -> Completion:
    """The completion in a whole answer.

    Raises:
        MalformedFrame: it is not one.
    """
    answer = decoded(body, _Answer)
    if not answer.choices:
        raise MalformedFrame("the router's answer has no choices")
    ordered = sorted(answer.choices, key=lambda choice: choice.index)
    return Completion(
        text=ordered[0].written(),
        finish_reason=ordered[0].finish_reason,
        usage=answer.usage.to_usage() if answer.usage else None,
        timings=answer.timings(),
        request_id=request_id,
        choices=tuple(choice.written() for choice in ordered),
        logprobs=ordered[0].scored(),
        # A chat has them beside its choices, for these have one prompt.
        prompt_logprobs=tuple(ordered[0].prompt_logprobs or answer.prompt_logprobs or ()),
        tool_calls=tuple(call.to_call() for call in ordered[0].called()),
    )


def chunk_of(data: str) -> Chunk:
    """The chunk in the data of one event.

    Raises:
        KVFerryError: the router reports that the answer failed.
    """
    answer = decoded(data, _Answer)
    if answer.error is not None:
        raise _error(answer.error, "internal_error")
    choice = answer.choices[0] if answer.choices else _Choice()
    return Chunk(
        text=choice.written(),
        finish_reason=choice.finish_reason,
        usage=answer.usage.to_usage() if answer.usage else None,
        timings=answer.timings(),
        index=choice.index,
        logprobs=choice.scored(),
        tool_calls=tuple(call.to_delta() for call in choice.called()),
    )


def joined(chunks: Sequence[Chunk], request_id: str) -> Completion:
    """The completion that a whole stream comes to."""
    count = 1 + max((chunk.index for chunk in chunks), default=0)
    choices = tuple("".join(chunk.text for chunk in chunks if chunk.index == index) for index in range(count))
    reasons = [chunk.finish_reason for chunk in chunks if chunk.finish_reason and chunk.index == 0]
    return Completion(
        text=choices[0],
        finish_reason=reasons[0] if reasons else None,
        usage=next((chunk.usage for chunk in chunks if chunk.usage), None),
        timings=next((chunk.timings for chunk in chunks if chunk.timings), None),
        request_id=request_id,
        choices=choices,
        logprobs=tuple(token for chunk in chunks if chunk.index == 0 for token in chunk.logprobs),
        tool_calls=joined_calls(call for chunk in chunks if chunk.index == 0 for call in chunk.tool_calls),
    )


def models_of(body: bytes) -> tuple[ModelCard, ...]:
    """The served models."""
    return tuple(decoded(body, _Models).data)


def tokenization_of(body: bytes) -> Tokenization:
    """What ``/tokenize`` says."""
    return decoded(body, Tokenization)


def text_of(body: bytes) -> str:
    """What ``/detokenize`` says."""
    return decoded(body, _Text).prompt


def health_of(body: bytes) -> Health:
    """The router's health."""
    return decoded(body, Health)


def error_of(status: int, body: bytes) -> KVFerryError:
    """The error that an answer with this status stands for, rebuilt to its class."""
    code = CODES_BY_STATUS.get(status, "internal_error" if status >= 500 else "invalid_request")
    try:
        error = decoded(body, _Answer).error
    except MalformedFrame:
        error = None
    if error is None:
        excerpt = body[:MAX_EXCERPT].decode(errors="replace")
        return error_from_code(code, f"the router answered {status}: {excerpt}")
    return _error(error, code)


def _error(error: _Error, code: str) -> KVFerryError:
    known = error.code if error.code in ERRORS_BY_CODE else code
    return error_from_code(known, error.message, field=error.param)
