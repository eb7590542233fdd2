"""Requests that the front refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from front_stage import (
    CHAT,
    CONTEXT,
    MODEL,
    TEXT,
    ScriptedService,
    refused,
    saying,
    serving_front,
)

from router.tokenizer import Tokenizer

LONG = [5] * CONTEXT
DEEP: Any = []
for _ in range(600):
    DEEP = [DEEP]


@pytest.fixture(scope="module")
def service() -> ScriptedService:
    return ScriptedService(saying((5,)), max_model_len=CONTEXT)


@pytest.fixture(scope="module")
def http(service: ScriptedService, bpe_tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    with serving_front(service, bpe_tokenizer) as url, httpx.Client(base_url=url, trust_env=False) as client:
        yield client


INVALID = [
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "got 0"),
    ({"prompt": ["a", ""]}, "prompt[1]", "empty"),
    ({"prompt": [[1], []]}, "prompt[1]", "empty"),
    ({"prompt": 5}, "prompt", "got 5"),
    ({"prompt": None}, "prompt", "got None"),
    ({"prompt": {"a": 1}}, "prompt", "{'a': 1}"),
    ({"prompt": [1, "a"]}, "prompt", "mixes"),
    ({"prompt": [1.5]}, "prompt[0]", "1.5"),
    ({"prompt": [-1]}, "prompt[0]", "-1"),
    ({"prompt": [1, 100000]}, "prompt[1]", "100000"),
    ({"prompt": [[1, 2], [3, 100000]]}, "prompt[1][1]", "100000"),
    ({"prompt": ["a"] * 65}, "prompt", "65"),
    ({"max_tokens": -1}, "max_tokens", "-1"),
    ({"max_tokens": 0}, "max_tokens", "0"),
    ({"max_tokens": "many"}, "max_tokens", "'many'"),
    ({"max_tokens": 1.5}, "max_tokens", "1.5"),
    ({"max_tokens": True}, "max_tokens", "True"),
    ({"temperature": 2.1}, "temperature", "2.1"),
    ({"temperature": -0.1}, "temperature", "-0.1"),
    ({"temperature": "hot"}, "temperature", "'hot'"),
    ({"top_p": 0}, "top_p", "0.0"),
    ({"top_p": 1.1}, "top_p", "1.1"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"top_k": 1 << 40}, "top_k", str(1 << 40)),
    ({"seed": 1 << 70}, "seed", str(1 << 70)),
    ({"seed": "x"}, "seed", "'x'"),
    ({"min_tokens": -1}, "min_tokens", "-1"),
    ({"min_tokens": 17}, "min_tokens", "17"),
    ({"ignore_eos": "no"}, "ignore_eos", "'no'"),
    ({"stop": ""}, "stop", "''"),
    ({"stop": ["a", ""]}, "stop[1]", "''"),
    ({"stop": ["a"] * 5}, "stop", "<= 4"),
    ({"stop": "a" * 257}, "stop", "<= 256"),
    ({"stop": 5}, "stop", "got 5"),
    ({"stop_token_ids": [100000]}, "stop_token_ids[0]", "100000"),
    ({"stop_token_ids": list(range(3, 66))}, "stop_token_ids", "got 63"),
    ({"stop_token_ids": "x"}, "stop_token_ids", "'x'"),
    ({"stream": "yes"}, "stream", "'yes'"),
    ({"stream": True, "stream_options": []}, "stream_options", "[]"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "got 1"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only with stream"),
    ({"cache_salt": "s" * 129}, "cache_salt", "128"),
    ({"priority": 101}, "priority", "101"),
    ({"priority": -101}, "priority", "-101"),
    ({"priority": 1.5}, "priority", "1.5"),
    ({"priority": "high"}, "priority", "high"),
    ({"timeout": 0}, "timeout", "got 0"),
    ({"model": 5}, "model", "got 5"),
    ({"model": None}, "model", "got None"),
]


@pytest.mark.parametrize(("fields", "param", "says"), INVALID)
def test_invalid_completion(http: httpx.Client, fields: dict[str, Any], param: str, says: str) -> None:
    message = refused(http.post("/v1/completions", json={**TEXT, **fields}), 400, "invalid_request", param)
    assert says in message
    assert param.split("[")[0].split(".")[0] in message


INVALID_CHATS = [
    ({"messages": []}, "messages", "[]"),
    ({"messages": "hi"}, "messages", "'hi'"),
    ({"messages": [5]}, "messages[0]", "got 5"),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "required"),
    ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role", "'king'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "got 7"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "missing"),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type", "required"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]", "'a'"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "0"),
    ({"max_completion_tokens": -5, "max_tokens": 5}, "max_completion_tokens", "-5"),
]


@pytest.mark.parametrize(("fields", "param", "says"), INVALID_CHATS)
def test_invalid_chat(http: httpx.Client, fields: dict[str, Any], param: str, says: str) -> None:
    message = refused(http.post("/v1/chat/completions", json={**CHAT, **fields}), 400, "invalid_request", param)
    assert says in message


BOTH = []
UNSUPPORTED = [
    *(("/v1/completions", TEXT, *case) for case in BOTH),
    *(("/v1/chat/completions", CHAT, *case) for case in BOTH),
    ("/v1/completions", TEXT, "suffix", "end"),
    ("/v1/chat/completions", CHAT, "functions", [{}]),
    ("/v1/chat/completions", CHAT, "modalities", ["audio"]),
]


@pytest.mark.parametrize(("path", "base", "field", "value"), UNSUPPORTED)
def test_unsupported_field(http: httpx.Client, path: str, base: dict[str, Any], field: str, value: Any) -> None:
    message = refused(http.post(path, json={**base, field: value}), 400, "unsupported_field", field)
    assert field in message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "function", "content": "a"}, "messages[0].role"),
        ({"role": "assistant", "content": "a", "function_call": {"name": "f"}}, "messages[0].function_call"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
    ],
)
def test_unsupported_message(http: httpx.Client, message: dict[str, Any], param: str) -> None:
    refused(http.post("/v1/chat/completions", json={**CHAT, "messages": [message]}), 400, "unsupported_field", param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"nope",
        b'{"model": "\xff"}',
        b'{"model": "m", "prompt": "\\ud800 alone"}',
        b'{"model": NaN}',
        b'{"x": ' + b"[" * 100_000,
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bodies_that_are_not_json(http: httpx.Client, path: str, body: bytes) -> None:
    assert "JSON" in refused(http.post(path, content=body), 400, "invalid_request", None)


@pytest.mark.parametrize("body", [b"[]", b'"a"', b"5", b"null"])
def test_bodies_that_are_not_an_object(http: httpx.Client, body: bytes) -> None:
    assert "object" in refused(http.post("/v1/completions", content=body), 400, "invalid_request", None)


@pytest.mark.parametrize("field", ["model", "prompt"])
def test_missing_field(http: httpx.Client, field: str) -> None:
    body = {name: value for name, value in TEXT.items() if name != field}
    assert "required" in refused(http.post("/v1/completions", json=body), 400, "invalid_request", field)


def test_wrong_model(http: httpx.Client) -> None:
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        message = refused(http.post(path, json={**body, "model": "gpt-x"}), 404, "model_not_found", "model")
        assert "gpt-x" in message


@pytest.mark.parametrize(
    ("path", "body", "param", "counts"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt", ["128"]),
        ("/v1/completions", {"prompt": [[5], [5] * 200]}, "prompt[1]", ["128", "200"]),
        ("/v1/completions", {"prompt": [5] * 100, "max_tokens": 29}, "max_tokens", ["128", "129", "100", "29"]),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "q" * 500}]}, "messages", ["128"]),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 1000}, "max_completion_tokens", ["128", "1000"]),
    ],
)
def test_prompt_over_the_context(
    http: httpx.Client, path: str, body: dict[str, Any], param: str, counts: list[str]
) -> None:
    message = refused(http.post(path, json={"model": MODEL, **body}), 400, "context_length_exceeded", param)
    assert all(count in message for count in counts)


def test_nothing_that_was_refused_reached_the_service(http: httpx.Client, service: ScriptedService) -> None:
    before = len(service.generations)
    test_wrong_model(http)
    refused(http.post("/v1/completions", json={**TEXT, "prompt": ["a", ""]}), 400, "invalid_request", "prompt[1]")
    assert len(service.generations) == before
