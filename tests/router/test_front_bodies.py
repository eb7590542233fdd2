"""Bodies at and over their bound."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from front_stage import (
    CONTEXT,
    MODEL,
    TEXT,
    ScriptedService,
    hanging,
    refused,
    saying,
    serving_front,
    taken,
)

from router.front.app import Front
from router.front.config import FrontConfig
from router.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def service() -> ScriptedService:
    return ScriptedService(saying((5,)), max_model_len=CONTEXT)


@pytest.fixture(scope="module")
def http(service: ScriptedService, bpe_tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    with serving_front(service, bpe_tokenizer) as url, httpx.Client(base_url=url, trust_env=False) as client:
        yield client


def test_body_over_the_bound(http: httpx.Client, service: ScriptedService) -> None:
    before = len(service.generations)
    body = json.dumps({**TEXT, "prompt": "a" * (10 << 20)}).encode()
    message = refused(http.post("/v1/completions", content=body), 413, "payload_too_large", None)
    assert str(4 << 20) in message

    def in_pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 100_000):
            yield body[start : start + 100_000]

    response = http.post("/v1/completions", content=in_pieces())
    assert "content-length" not in response.request.headers
    refused(response, 413, "payload_too_large", None)
    assert len(service.generations) == before
    taken(http, service, "/v1/completions", TEXT)


def test_body_at_the_bound(bpe_tokenizer: Tokenizer) -> None:
    body = json.dumps(TEXT).encode()
    service = ScriptedService(saying((5,)))
    config = FrontConfig(max_body_bytes=len(body))
    with serving_front(service, bpe_tokenizer, config) as url, httpx.Client(base_url=url, trust_env=False) as http:
        assert http.post("/v1/completions", content=body).status_code == 200
        refused(http.post("/v1/completions", content=body + b" "), 413, "payload_too_large", None)
        # Far over the bound: refused without reading it all.
        huge = b" " * (len(body) * 16 + 1)
        refused(http.post("/v1/completions", content=huge), 413, "payload_too_large", None)


def test_memory_stays_bounded_while_a_body_is_read(bpe_tokenizer: Tokenizer) -> None:
    """What the front holds of an endless body is its bound, no more."""
    sent: list[dict[str, Any]] = []
    chunk = 64 << 10

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": bytes(chunk), "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    front = Front(ScriptedService(hanging()), bpe_tokenizer, FrontConfig(max_body_bytes=1 << 20))
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    tracemalloc.start()
    try:
        asyncio.run(front(scope, receive, send))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sent[0]["status"] == 413
    assert peak < 2 << 20


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_body_that_is_said_to_be_no_json_is_refused(http: httpx.Client, path: str) -> None:
    # What a page in a browser can send to any address without asking.
    for kind in ("text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "multipart/form-data"):
        response = http.post(path, content=json.dumps(TEXT).encode(), headers={"content-type": kind})
        assert kind.partition(";")[0] in refused(response, 415, "unsupported_media_type", "content-type")


@pytest.mark.parametrize("kind", [None, "application/json", "Application/JSON; charset=utf-8", "application/json ;x=y"])
def test_a_body_may_be_said_to_be_json_or_not_at_all(http: httpx.Client, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = http.post("/v1/completions", content=json.dumps(TEXT).encode(), headers=headers)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_text_that_can_never_fit_is_not_tokenised_to_its_end(
    bpe_tokenizer: Tokenizer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    encode = bpe_tokenizer.encode

    def watched(text: str, **options: bool) -> tuple[int, ...]:
        seen.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(bpe_tokenizer, "encode", watched)
    text = "the ferry " * 300_000
    asked = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    service = ScriptedService(saying((5,)), max_model_len=CONTEXT)
    with serving_front(service, bpe_tokenizer) as url, httpx.Client(base_url=url, trust_env=False) as client:
        response = client.post(path, json={"model": MODEL, **asked})
    where = "prompt" if path == "/v1/completions" else "messages"
    assert "alone has over" in refused(response, 400, "context_length_exceeded", where)
    assert max(seen) < len(text) / 100
