"""What clients send: the request bodies of OpenAI's API, as far as they are served. Unknown fields are ignored.

A field typed ``Any`` is not served; it is here so that a value that asks for something is refused, not ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from protocol.messages import MAX_SALT
from protocol.sampling import MAX_BIASED, MAX_LOGPROBS, TokenId
from router.priority import MAX_PRIORITY
from router.slo.classes import MAX_CLASS_NAME

MAX_STOPS = 4
MAX_STOP_LENGTH = 256
MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TOOLS = 128
MAX_CALLS = 128
"""Calls of tools in one message."""
MAX_DESCRIPTION = 16 << 10
MAX_CALL_ID = 256
MAX_CHOICES = 1024
"""Texts that an answer may be one of."""

StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenKey = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,10}$")]
"""A token id as JSON's objects have it."""
Seed = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content; only text is served."""

    type: str
    text: str | None = None


FunctionName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
CallId = Annotated[str, msgspec.Meta(max_length=MAX_CALL_ID)]


class ToolFunction(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: FunctionName
    description: Annotated[str, msgspec.Meta(max_length=MAX_DESCRIPTION)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool; there are functions only."""

    type: Literal["function"]
    function: ToolFunction


Tools = Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)]


class NamedFunction(msgspec.Struct, frozen=True):
    """Which function."""

    name: FunctionName


class NamedTool(msgspec.Struct, frozen=True):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(msgspec.Struct, frozen=True):
    """What the assistant called: ``arguments`` is the text of a JSON object."""

    name: FunctionName
    arguments: str


class MessageCall(msgspec.Struct, frozen=True):
    """A call in an assistant's message."""

    id: CallId
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a chat."""

    role: str
    content: str | Annotated[list[ContentPart], msgspec.Meta(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageCall], msgspec.Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: CallId | None = None
    function_call: Any = None


Messages = Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]


class StreamOptions(msgspec.Struct, frozen=True):
    """How a stream is sent."""

    include_usage: bool | None = None


class JsonSchema(msgspec.Struct, frozen=True):
    """What a JSON answer must look like."""

    name: str | None = None
    schema: dict[str, Any] | bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """OpenAI's way to ask for a form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


Choices = Annotated[
    list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1, max_length=MAX_CHOICES)
]


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's way to ask for a form: one of these."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that chats and completions share; None means not given."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Seed | None = None
    stop: StopString | Annotated[list[StopString], msgspec.Meta(max_length=MAX_STOPS)] | None = None

    top_k: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    cache_salt: Annotated[str, msgspec.Meta(max_length=MAX_SALT)] | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0, le=86400)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None

    ttft_target: Annotated[float, msgspec.Meta(gt=0, le=86400)] | None = None
    slo_class: Annotated[str, msgspec.Meta(max_length=MAX_CLASS_NAME)] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None

    n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    logit_bias: Annotated[dict[TokenKey, float], msgspec.Meta(max_length=MAX_BIASED)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[str | TokenId | list[TokenId]]

    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, msgspec.Meta(ge=1)] | None = None

    echo: bool | None = None

    suffix: Any = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``POST /tokenize``: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    tools: Tools | None = None
    continue_final_message: Any = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``POST /detokenize``."""

    tokens: list[TokenId]
    model: str | None = None
