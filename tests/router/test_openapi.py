"""The OpenAPI document says what the front does: its routes, the bodies that it takes, the answers that it gives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from front_stage import CHAT, IM_END, MODEL, TEXT, TIMED, ScriptedService, events_of, one_by_one, serving_front
from test_front_prompts import telling
from test_front_tools import SAID, TOOLS, service_saying

from protocol.errors import WorkerLost
from protocol.sampling import TokenLogprobs
from router.front.answer_schema import ChatAnswer, ChatChunk, CompletionAnswer, CompletionChunk, ErrorAnswer
from router.front.app import Front
from router.front.generation import Generation, Output
from router.front.openapi import OPERATIONS
from router.front.schema import ChatRequest, CompletionRequest
from router.tokenizer import Tokenizer

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USAGE = {"stream_options": {"include_usage": True}}


@pytest.fixture
def service(bpe_tokenizer: Tokenizer) -> ScriptedService:
    return ScriptedService(one_by_one((*bpe_tokenizer.encode("the 渡"), IM_END), "stop"))


@pytest.fixture
def http(bpe_tokenizer: Tokenizer, service: ScriptedService) -> Iterator[httpx.Client]:
    with serving_front(service, bpe_tokenizer) as url, httpx.Client(base_url=url, trust_env=False) as http:
        yield http


def test_it_names_every_route_and_no_other(http: httpx.Client, bpe_tokenizer: Tokenizer) -> None:
    document = http.get("/openapi.json").json()
    told = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    routes = Front(ScriptedService(one_by_one((5,))), bpe_tokenizer)._routes
    found = {
        (path + {"/v1/models/": "{model}", "/explain/": "{request}"}.get(path, ""), method)
        for table in (routes._exact, routes._below)
        for path, methods in table.items()
        for method in methods
    }
    assert told == found
    assert {each.path for each in OPERATIONS} == set(document["paths"])


def test_its_bodies_are_those_of_the_parser(http: httpx.Client) -> None:
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    for kind in (ChatRequest, CompletionRequest):
        assert list(schemas[kind.__name__]["properties"]) == list(kind.__struct_fields__)


def fitting(response: httpx.Response, whole: Any, chunk: Any) -> None:
    """Check an answer, or each event of it, against its type."""
    assert response.status_code == 200, response.text
    if response.headers["content-type"] == "application/json":
        msgspec.json.decode(response.content, type=whole)
        return
    for event in events_of(response):
        if event != "[DONE]":
            msgspec.convert(event, chunk)


@pytest.mark.parametrize("stream", [{}, {"stream": True}, {"stream": True, **USAGE}])
def test_answers_are_as_it_says(stream: dict[str, Any], bpe_tokenizer: Tokenizer, http: httpx.Client) -> None:
    for fields in ({}, {"n": 2}):
        body = {**fields, **stream}
        fitting(http.post(CHATS, json={**CHAT, **body}, headers=TIMED), ChatAnswer, ChatChunk)
        fitting(http.post(COMPLETIONS, json={**TEXT, **body}), CompletionAnswer, CompletionChunk)
    with (
        serving_front(service_saying(bpe_tokenizer, SAID), bpe_tokenizer) as url,
        httpx.Client(base_url=url, trust_env=False) as tools,
    ):
        fitting(tools.post(CHATS, json={**CHAT, "tools": TOOLS, **stream}), ChatAnswer, ChatChunk)
    reply = bpe_tokenizer.encode("the ferry")
    with (
        serving_front(telling(reply), bpe_tokenizer) as url,
        httpx.Client(base_url=url, trust_env=False) as scores,
    ):
        body = {"model": MODEL, "prompt": "the ferry", "max_tokens": len(reply), "logprobs": 1, "echo": True, **stream}
        fitting(scores.post(COMPLETIONS, json=body), CompletionAnswer, CompletionChunk)
        if not stream:
            body |= {"prompt_logprobs": 1}
            fitting(scores.post(COMPLETIONS, json=body), CompletionAnswer, CompletionChunk)
            whole = {**CHAT, "prompt_logprobs": 1, "logprobs": True, "top_logprobs": 1, "max_tokens": len(reply)}
            fitting(scores.post(CHATS, json=whole), ChatAnswer, ChatChunk)


def test_refusals_are_as_it_says(bpe_tokenizer: Tokenizer) -> None:
    async def script(_: Generation) -> AsyncIterator[Output]:
        yield Output((5,), logprobs=(TokenLogprobs(-1.0),))
        raise WorkerLost("decode-0 is gone")

    with (
        serving_front(ScriptedService(script), bpe_tokenizer) as url,
        httpx.Client(base_url=url, trust_env=False) as http,
    ):
        for fields in ({"n": 0}, {"model": "other"}, {}):
            msgspec.json.decode(http.post(CHATS, json={**CHAT, **fields}).content, type=ErrorAnswer)
        events = events_of(http.post(CHATS, json={**CHAT, "logprobs": True, "stream": True}))
    msgspec.convert(events[-1], ErrorAnswer)


@pytest.mark.parametrize("path", ["/v1/models", f"/v1/models/{MODEL}", "/health", "/ping", "/version"])
def test_what_is_not_generated_is_as_it_says(path: str, http: httpx.Client) -> None:
    named = path.replace(MODEL, "{model}")
    answer = next(each.answer for each in OPERATIONS if each.path == named)
    msgspec.json.decode(http.get(path).content, type=answer, strict=True)


def test_tokens_are_as_it_says(http: httpx.Client) -> None:
    by_path = {each.path: each.answer for each in OPERATIONS}
    told = http.post("/tokenize", json={"prompt": "the", "return_token_strs": True})
    tokens = msgspec.json.decode(told.content, type=by_path["/tokenize"]).tokens
    msgspec.json.decode(http.post("/detokenize", json={"tokens": tokens}).content, type=by_path["/detokenize"])
