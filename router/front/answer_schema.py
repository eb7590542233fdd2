"""What clients get: the shapes of answers, for the OpenAPI document and for whoever checks what is sent against it.

Answers are not built from these, for a stream's chunks are made of bytes that are ready (:mod:`router.front.formats`).
A field that is not always there is ``UNSET``; no other field ever is.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from router.front.generation import EndReason


class _Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Has the named fields and no others."""


class ErrorDetail(_Shape, frozen=True, kw_only=True):
    """What was wrong; ``param`` names the field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(_Shape, frozen=True, kw_only=True):
    """Body of every refusal, and the event that ends a stream which fails."""

    error: ErrorDetail


class PromptTokensDetails(_Shape, frozen=True, kw_only=True):
    """Tokens of the prompt that were found in a cache."""

    cached_tokens: int


class UsageAnswer(_Shape, frozen=True, kw_only=True):
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptToken(_Shape, frozen=True, kw_only=True):
    """One candidate for a prompt's token."""

    logprob: float
    rank: int
    decoded_token: str


PromptTokens = list[dict[str, PromptToken] | None]
"""For each token of a prompt its candidates by id; null for the first."""


class TopLogprob(_Shape, frozen=True, kw_only=True):
    """One candidate for a token of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(_Shape, frozen=True, kw_only=True):
    """One token of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Shape, frozen=True, kw_only=True):
    """Log-probabilities of a chat's answer."""

    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(_Shape, frozen=True, kw_only=True):
    """Log-probabilities of a completion, one entry per token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class AnsweredFunction(_Shape, frozen=True, kw_only=True):
    """What is called: ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str


class AnsweredCall(_Shape, frozen=True, kw_only=True):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: AnsweredFunction


class FunctionPiece(_Shape, frozen=True, kw_only=True):
    """A piece of a call: its name with the first, then its arguments."""

    name: str | UnsetType = UNSET
    arguments: str


class CallPiece(_Shape, frozen=True, kw_only=True):
    """A piece of the call with this index; ``id`` and ``type`` come with the first."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionPiece


class AnsweredMessage(_Shape, frozen=True, kw_only=True):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class MessageDelta(_Shape, frozen=True, kw_only=True):
    """A piece of the assistant's turn."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CallPiece] | UnsetType = UNSET


class ChatChoice(_Shape, frozen=True, kw_only=True):
    """One answer to a chat."""

    index: int
    message: AnsweredMessage
    logprobs: ChatLogprobs | None
    finish_reason: EndReason


class ChatChunkChoice(_Shape, frozen=True, kw_only=True):
    """A piece of one answer to a chat."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: EndReason | None


class CompletionChoice(_Shape, frozen=True, kw_only=True):
    """One continuation of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: EndReason
    prompt_logprobs: PromptTokens | UnsetType | None = UNSET


class CompletionChunkChoice(_Shape, frozen=True, kw_only=True):
    """A piece of one continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: EndReason | None


class _Answer(_Shape, frozen=True, kw_only=True):
    """What all answers have; ``kvferry`` are timings, where the header x-kvferry-timings asked for them."""

    id: str
    created: int
    model: str
    kvferry: Any = UNSET


class ChatAnswer(_Answer, frozen=True, kw_only=True):
    """Answer of ``POST /v1/chat/completions`` that is not streamed."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: PromptTokens | UnsetType | None = UNSET


class ChatChunk(_Answer, frozen=True, kw_only=True):
    """Data of one event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageAnswer | UnsetType | None = UNSET


class CompletionAnswer(_Answer, frozen=True, kw_only=True):
    """Answer of ``POST /v1/completions`` that is not streamed."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageAnswer


class CompletionChunk(_Answer, frozen=True, kw_only=True):
    """Data of one event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: UsageAnswer | UnsetType | None = UNSET


class ModelAnswer(_Shape, frozen=True, kw_only=True):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelsAnswer(_Shape, frozen=True, kw_only=True):
    """The served models."""

    object: Literal["list"]
    data: list[ModelAnswer]


class TokenizeAnswer(_Shape, frozen=True, kw_only=True):
    """Tokens of a text."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(_Shape, frozen=True, kw_only=True):
    """Text of tokens."""

    prompt: str


class VersionAnswer(_Shape, frozen=True, kw_only=True):
    """Which kvferry this is."""

    version: str
