"""The OpenAPI document of the front: its requests are the types that the parser reads bodies with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from router.front.answer_schema import (
    ChatAnswer,
    ChatChunk,
    CompletionAnswer,
    CompletionChunk,
    DetokenizeAnswer,
    ErrorAnswer,
    ModelAnswer,
    ModelsAnswer,
    TokenizeAnswer,
    VersionAnswer,
)
from router.front.generation import ServiceHealth
from router.front.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from router.overview import ClusterOverview

REFUSALS = {
    400: "A field is wrong; it is named.",
    401: "No key, or one that is not known.",
    404: "There is no such model, or request.",
    413: "The body is too long.",
    415: "The body is said to be something else than JSON.",
    429: "Too many requests; the header retry-after says when to try again.",
    503: "There are no workers to serve it.",
    504: "It took longer than it may.",
}
JSON = "application/json"
EVENTS = "text/event-stream"
REQUEST_ID = {"x-request-id": {"description": "The router's own id of this request.", "schema": {"type": "string"}}}


@dataclass(frozen=True)
class Operation:
    """One thing that can be asked for.

    Attributes:
        method, path: of it; in the path a name in braces stands for all that follows.
        summary: of it.
        answer: type of the answer; None where it is no JSON of a fixed shape.
        body: type of the request's body; None where there is none.
        chunk: type of the events' data, where it can be streamed.
        kind: media type of the answer; that of events where it is nothing but a stream without an end.
        refusals: statuses that it may be refused with.
    """

    method: Literal["get", "post"]
    path: str
    summary: str
    answer: Any = None
    body: Any = None
    chunk: Any = None
    kind: str = JSON
    refusals: tuple[int, ...] = (401,)


_GENERATES = tuple(REFUSALS)
_AT_DESK = (400, 401, 404, 413, 415, 429)

OPERATIONS = (
    Operation(
        "post", "/v1/chat/completions", "Answer a chat.", ChatAnswer, ChatRequest, ChatChunk, refusals=_GENERATES
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue prompts.",
        CompletionAnswer,
        CompletionRequest,
        CompletionChunk,
        refusals=_GENERATES,
    ),
    Operation("post", "/tokenize", "Tokens of a text or a chat.", TokenizeAnswer, TokenizeRequest, refusals=_AT_DESK),
    Operation("post", "/detokenize", "Text of tokens.", DetokenizeAnswer, DetokenizeRequest, refusals=_AT_DESK),
    Operation("get", "/v1/models", "The served models.", ModelsAnswer),
    Operation("get", "/v1/models/{model}", "One served model.", ModelAnswer, refusals=(401, 404)),
    Operation("get", "/health", "Whether a new request can be served.", ServiceHealth, refusals=()),
    Operation("get", "/ready", "The same.", ServiceHealth, refusals=()),
    Operation("get", "/ping", "The same.", ServiceHealth, refusals=()),
    Operation("get", "/version", "Which kvferry this is.", VersionAnswer),
    Operation("get", "/metrics", "Metrics, as Prometheus reads them.", kind="text/plain"),
    Operation("get", "/cluster", "The workers and their state.", ClusterOverview),
    Operation(
        "get",
        "/cluster/events",
        "The same, again and again.",
        chunk=ClusterOverview,
        kind=EVENTS,
        refusals=(401, 429),
    ),
    Operation("get", "/explain/{request}", "Why a request went where it went.", refusals=(401, 404)),
    Operation("get", "/openapi.json", "This document."),
    Operation("get", "/", "The status page.", kind="text/html", refusals=()),
)


def document(version: str) -> bytes:
    """The document, in JSON, of this ``version`` of kvferry."""
    kinds = [kind for each in OPERATIONS for kind in (each.body, each.answer, each.chunk) if kind is not None]
    unique = [*dict.fromkeys([*kinds, ErrorAnswer])]
    schemas, components = msgspec.json.schema_components(unique, ref_template="#/components/schemas/{name}")
    known = dict(zip(unique, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method] = _described(each, known)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "kvferry", "version": version, "license": {"name": "Apache-2.0"}},
            # Keys are needed only where the router has some.
            "security": [{}, {"key": []}],
            "paths": paths,
            "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        }
    )


def _described(operation: Operation, known: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    schema = {"type": "string"} if operation.kind != JSON else known.get(operation.answer, {"type": "object"})
    content: dict[str, Any] = {operation.kind: {"schema": schema}}
    if operation.chunk is not None:
        end = "there is no last one" if operation.kind == EVENTS else "the last says [DONE]"
        content[EVENTS] = {
            # Without a type: some take it for that of the whole stream, others for that of an event.
            "schema": {"description": f"Events, each with a {operation.chunk.__name__} as data; {end}."}
        }
    responses = {"200": {"description": operation.summary, "headers": REQUEST_ID, "content": content}}
    if operation.answer is ServiceHealth:
        responses["503"] = {"description": "It cannot.", "headers": REQUEST_ID, "content": content}
    for status in operation.refusals:
        responses[str(status)] = {
            "description": REFUSALS[status],
            "headers": REQUEST_ID,
            "content": {JSON: {"schema": known[ErrorAnswer]}},
        }
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": known[operation.body]}}}
    if "{" in operation.path:
        name = operation.path.partition("{")[2].rstrip("}")
        described["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    return described
