"""Bytes of a body to a checked request; every refusal names the field and says the value."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import msgspec

from protocol.errors import InvalidRequest, UnsupportedField
from router.front.schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    DetokenizeRequest,
    MessageCall,
    TokenizeRequest,
)

R = TypeVar("R", bound=msgspec.Struct)

MAX_SHOWN = 100
"""Characters of an offending value that an error message shows."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Served roles, and what templates call them."""

_PATH = re.compile(r" - at (?:`key` in )?`\$(?P<path>.*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>.+?)`")
_STEP = re.compile(r"\.?(?P<key>[^.\[]+)|\[(?P<index>\d+|\.\.\.)\]")

_chats = msgspec.json.Decoder(ChatRequest)
_completions = msgspec.json.Decoder(CompletionRequest)
_tokenizes = msgspec.json.Decoder(TokenizeRequest)
_detokenizes = msgspec.json.Decoder(DetokenizeRequest)


def _number(neutral: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value == neutral


def _empty(value: Any) -> bool:
    return isinstance(value, list | dict | str) and not value


def _false(value: Any) -> bool:
    return value is False


UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "suffix": _empty,
    "functions": _empty,
    "function_call": lambda value: value in ("none", "auto"),
    "modalities": lambda value: value == ["text"],
    "audio": _empty,
    "continue_final_message": _false,
}
"""Fields that are known and not served, with the test for a value that asks for nothing (null always does)."""


def shown(value: Any) -> str:
    """``value`` for an error message, cut to its bound."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def parse_chat(body: bytes) -> ChatRequest:
    """The chat request in ``body``.

    Raises:
        InvalidRequest: it is not JSON, or a field has the wrong type or length.
        UnsupportedField: it asks for something that is not served.
    """
    return _parse(_chats, body)


def parse_completion(body: bytes) -> CompletionRequest:
    """The completion request in ``body``; raises as :func:`parse_chat`."""
    return _parse(_completions, body)


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """The tokenize request in ``body``; raises as :func:`parse_chat`, and unless it has a prompt or messages."""
    request = _parse(_tokenizes, body)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("either prompt or messages is required, and not both", field="prompt")
    return request


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """The detokenize request in ``body``; raises as :func:`parse_chat`."""
    return _parse(_detokenizes, body)


def check_token_ids(token_ids: Collection[int], vocab_size: int, where: str) -> None:
    """Refuse ids that no token has.

    Raises:
        InvalidRequest: names the field, with the index, and the value.
    """
    if max(token_ids, default=0) < vocab_size:
        return
    for index, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            field = f"{where}[{index}]"
            raise InvalidRequest(f"{field} must be a token id of at most {vocab_size - 1}, got {token_id}", field=field)


def chat_messages(messages: Iterable[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as templates want them: a role they know, plain text, and arguments of calls as objects.

    Raises:
        InvalidRequest: a role is unknown, a content is missing, or a call's arguments are no JSON object.
        UnsupportedField: a content part or a role that is not served.
    """
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _parse(decoder: msgspec.json.Decoder[R], body: bytes) -> R:
    try:
        request = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(error, body) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    for name in request.__struct_fields__:
        neutral = UNSUPPORTED.get(name)
        value = getattr(request, name)
        if neutral is not None and value is not None and not neutral(value):
            raise UnsupportedField(f"{name} is not supported, got {shown(value)}", field=name)
    return request


def _explain(error: msgspec.ValidationError, body: bytes) -> InvalidRequest:
    """The refusal for a body of the wrong shape; decodes it again to find the value."""
    text = str(error)
    found = _PATH.search(text)
    reason = text[: found.start()] if found else text
    path = found["path"].lstrip(".") if found else ""
    missing = _MISSING.search(reason)
    if missing:
        path = f"{path}.{missing['name']}".lstrip(".")
        return InvalidRequest(f"{path} is required", field=path)
    # Of a value in a mapping nobody tells the key.
    path = path.removesuffix("[...]")
    try:
        value = _follow(msgspec.json.decode(body), path)
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError, ValueError):
        return InvalidRequest(f"{path or 'the body'}: {reason}", field=path or None)
    wanted = reason.partition(", got `")[0]
    return InvalidRequest(f"{path or 'the body'}: {wanted}, got {shown(value)}", field=path or None)


def _follow(value: Any, path: str) -> Any:
    for step in _STEP.finditer(path):
        value = value[step["key"]] if step["key"] else value[int(step["index"])]
    return value


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.role == "function":
        raise UnsupportedField(f"{where}.role {message.role!r} is not supported", field=f"{where}.role")
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(
            f"{where}.role must be one of {sorted(ROLES)}, got {shown(message.role)}", field=f"{where}.role"
        )
    if message.function_call:
        raise UnsupportedField(f"{where}.function_call is not supported", field=f"{where}.function_call")
    calls = message.tool_calls or []
    if calls and role != "assistant":
        raise InvalidRequest(f"{where}.tool_calls is the assistant's alone", field=f"{where}.tool_calls")
    content = message.content
    if content is None and not calls:
        raise InvalidRequest(f"{where}.content is missing", field=f"{where}.content")
    if isinstance(content, list):
        content = "\n".join(_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    turn: dict[str, Any] = {"role": role, "content": content or ""}
    if message.name is not None:
        turn["name"] = message.name
    if calls:
        turn["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    if role == "tool":
        if message.tool_call_id is None:
            raise InvalidRequest(f"{where}.tool_call_id is missing", field=f"{where}.tool_call_id")
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _call(call: MessageCall, where: str) -> dict[str, Any]:
    field = f"{where}.function.arguments"
    try:
        # Templates write them as objects.
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(
            f"{field} must be the text of a JSON object, got {shown(call.function.arguments)}", field=field
        ) from error
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _part(part: ContentPart, where: str) -> str:
    if part.type != "text":
        raise UnsupportedField(f"{where}.type must be 'text', got {shown(part.type)}", field=f"{where}.type")
    if part.text is None:
        raise InvalidRequest(f"{where}.text is missing", field=f"{where}.text")
    return part.text
