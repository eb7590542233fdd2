"""The bytes of answers: OpenAI's chat and completion objects, whole and as server-sent events.

What is the same in every chunk of a stream is serialised once; a chunk costs one encoding of its text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import msgspec

from router.front.generation import EndReason, GenerationReport
from router.front.logprobs import ShownToken, chat_logprobs, completion_logprobs
from router.front.tool_calls import CallDelta, CallOpening, ToolCall

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


@dataclass(frozen=True)
class Result:
    """One finished choice."""

    text: str
    finish_reason: EndReason
    tokens: tuple[ShownToken, ...] = ()
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Tokens of one request, over all choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def to_json(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


PromptList = list[dict[str, Any] | None]
"""What is shown of each token of a prompt."""

Timings = tuple[GenerationReport | None, ...]
"""Reports of all choices, by index; None for one that gave none."""


class Shape(Protocol):
    """What is different between chats and completions."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def opening(self) -> dict[str, Any] | None:
        """The fields of a choice's first chunk; None when there is none before the text."""

    def text(self, text: str) -> dict[str, Any]:
        """The fields of a chunk with text."""

    def closing(self) -> dict[str, Any]:
        """The fields of a choice's last chunk."""

    def whole(self, result: Result) -> dict[str, Any]:
        """The fields of a whole choice."""

    def logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any]:
        """The log-probabilities of a choice, or of one chunk of it."""

    def add_prompts(self, answer: dict[str, Any], prompts: Sequence[PromptList]) -> None:
        """Put what is shown of each choice's prompt into ``answer``, where vLLM's API has it."""


class ChatShape:
    """``chat.completion``."""

    id_prefix: ClassVar[str] = "chatcmpl-"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def opening(self) -> dict[str, Any] | None:
        """The role comes first."""
        return {"delta": {"role": "assistant", "content": ""}}

    def text(self, text: str) -> dict[str, Any]:
        """A delta."""
        return {"delta": {"content": text}}

    def closing(self) -> dict[str, Any]:
        """An empty delta."""
        return {"delta": {}}

    def whole(self, result: Result) -> dict[str, Any]:
        """The assistant's message."""
        content = None if result.calls and not result.text else result.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if result.calls:
            message["tool_calls"] = [_call(call) for call in result.calls]
        return {"message": message}

    def logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any]:
        """One object per token."""
        return chat_logprobs(tokens)

    def add_prompts(self, answer: dict[str, Any], prompts: Sequence[PromptList]) -> None:
        """All choices have one prompt."""
        answer["prompt_logprobs"] = prompts[0]


class CompletionShape:
    """``text_completion``."""

    id_prefix: ClassVar[str] = "cmpl-"
    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    def opening(self) -> dict[str, Any] | None:
        """Text comes first."""
        return None

    def text(self, text: str) -> dict[str, Any]:
        """Plain text."""
        return {"text": text}

    def closing(self) -> dict[str, Any]:
        """Empty text."""
        return {"text": ""}

    def whole(self, result: Result) -> dict[str, Any]:
        """Plain text."""
        return {"text": result.text}

    def logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any]:
        """One list per kind of value."""
        return completion_logprobs(tokens)

    def add_prompts(self, answer: dict[str, Any], prompts: Sequence[PromptList]) -> None:
        """Each choice has its own."""
        for choice, prompt in zip(answer["choices"], prompts, strict=True):
            choice["prompt_logprobs"] = prompt


class AnswerFormat:
    """The bytes of one answer.

    Args:
        shape: chat or completion.
        request_id: of the HTTP request.
        model: name to show.
        include_usage: whether a stream's last chunk has the usage (the others then say null).
        timings: whether the client asked for them.
        logprobs: whether it asked for log-probabilities.
    """

    def __init__(
        self, shape: Shape, request_id: str, model: str, *, include_usage: bool, timings: bool, logprobs: bool = False
    ) -> None:
        self._shape = shape
        self._head = {"id": shape.id_prefix + request_id, "created": int(time.time()), "model": model}
        self._include_usage = include_usage
        self._timings = timings
        self._logprobs = logprobs
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def opening(self, index: int) -> bytes:
        """The event before a choice's text; empty where there is none."""
        fields = self._shape.opening()
        return b"" if fields is None else event(_encode(self._chunk([_choice(index, fields, None)])))

    def text(self, index: int, text: str, tokens: Sequence[ShownToken] = ()) -> bytes:
        """The event for a piece of text, and the tokens that came with it."""
        if tokens:
            choice = _choice(index, self._shape.text(text), None) | {"logprobs": self._shape.logprobs(tokens)}
            return event(_encode(self._chunk([choice])))
        frame = self._frames.get(index)
        if frame is None:
            frame = self._frames[index] = self._frame(index)
        return frame[0] + _encode(text) + frame[1]

    def call(self, index: int, call: CallDelta) -> bytes:
        """The event for a piece of a call of a tool, its name or some of its arguments; chats alone have them."""
        if isinstance(call, CallOpening):
            piece = {"index": call.index, **_call(ToolCall(call.id, call.name, ""))}
        else:
            piece = {"index": call.index, "function": {"arguments": call.text}}
        return event(_encode(self._chunk([_choice(index, {"delta": {"tool_calls": [piece]}}, None)])))

    def closing(self, index: int, reason: EndReason) -> bytes:
        """The JSON of a choice's last chunk, without timings."""
        return _encode(self._chunk([_choice(index, self._shape.closing(), reason)]))

    def ending(self, last: bytes, usage: Usage, timings: Timings) -> bytes:
        """The events that end a stream: the ``last`` choice's closing, usage where asked for, and the end mark.

        Timings ride on whichever is the last chunk.
        """
        if self._include_usage:
            chunk = {**self._chunk([]), "usage": usage.to_json()}
            return event(last) + event(_encode({**chunk, **self._timed(timings)})) + DONE
        extra = self._timed(timings)
        # Both are objects with at least one field: one runs on into the other.
        return event(last[:-1] + b"," + _encode(extra)[1:] if extra else last) + DONE

    def whole(
        self, results: list[Result], usage: Usage, timings: Timings, prompts: Sequence[PromptList] | None = None
    ) -> bytes:
        """The JSON of an answer that is not streamed; with ``prompts``, what is shown of each choice's."""
        choices = [
            _choice(index, self._shape.whole(result), result.finish_reason) for index, result in enumerate(results)
        ]
        if self._logprobs:
            for choice, result in zip(choices, results, strict=True):
                choice["logprobs"] = self._shape.logprobs(result.tokens)
        answer = {**self._head, "object": self._shape.whole_object, "choices": choices, "usage": usage.to_json()}
        if prompts is not None:
            self._shape.add_prompts(answer, prompts)
        return _encode({**answer, **self._timed(timings)})

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self._shape.chunk_object, "choices": choices}
        return {**chunk, "usage": None} if self._include_usage else chunk

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        mark = "\x00mark\x00"
        chunk = event(_encode(self._chunk([_choice(index, self._shape.text(mark), None)])))
        # The text comes last of all that could hold the mark: the model's name stands before it.
        before, _, after = chunk.rpartition(_encode(mark))
        return before, after

    def _timed(self, timings: Timings) -> dict[str, Any]:
        if not self._timings:
            return {}
        reports = [None if report is None else asdict(report) for report in timings]
        return {"kvferry": reports[0] if len(reports) == 1 else reports}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _choice(index: int, fields: dict[str, Any], reason: EndReason | None) -> dict[str, Any]:
    return {"index": index, **fields, "logprobs": None, "finish_reason": reason}
