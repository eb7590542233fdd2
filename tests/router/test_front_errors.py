"""Errors as statuses and as events."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from front_stage import (
    CHAT,
    TEXT,
    ScriptedService,
    ask,
    events_of,
    failing,
)

from protocol.errors import (
    ERRORS_BY_CODE,
    AttemptsExhausted,
    ContextLengthExceeded,
    DeadlineExceeded,
    KVFerryError,
    LayoutMismatch,
    NoWorkerAvailable,
    Overloaded,
    WorkerLost,
)
from router.front.errors import status_of
from router.front.generation import Generation, Output
from router.tokenizer import Tokenizer

STATUSES = [
    (Overloaded("the queue is full"), 429, "rate_limit_error", "overloaded"),
    (NoWorkerAvailable("no live worker"), 503, "server_error", "no_worker_available"),
    (DeadlineExceeded("10 s passed"), 504, "server_error", "deadline_exceeded"),
    (AttemptsExhausted("4 attempts failed"), 500, "server_error", "attempts_exhausted"),
    (LayoutMismatch("block size"), 500, "server_error", "layout_mismatch"),
    (ContextLengthExceeded("too long", field="prompt"), 400, "invalid_request_error", "context_length_exceeded"),
    (WorkerLost("gone"), 500, "server_error", "worker_lost"),
    (ZeroDivisionError("secret detail"), 500, "server_error", "internal_error"),
]


@pytest.mark.parametrize(("error", "status", "kind", "code"), STATUSES)
@pytest.mark.parametrize("stream", [False, True])
def test_error_before_the_first_token(
    bpe_tokenizer: Tokenizer, error: Exception, status: int, kind: str, code: str, stream: bool
) -> None:
    service = ScriptedService(failing(error))
    response = ask(bpe_tokenizer, service, "/v1/completions", {**TEXT, "stream": stream})
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    body = response.json()["error"]
    assert (body["type"], body["code"]) == (kind, code)
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert "secret" not in response.text


@pytest.mark.parametrize(("error", "status", "kind", "code"), STATUSES)
def test_error_in_mid_stream(bpe_tokenizer: Tokenizer, error: Exception, status: int, kind: str, code: str) -> None:
    service = ScriptedService(failing(error, (5,), (6,)))
    events = events_of(ask(bpe_tokenizer, service, "/v1/chat/completions", {**CHAT, "stream": True}))
    assert len(events) >= 2
    assert events[-1]["error"]["type"] == kind
    assert events[-1]["error"]["code"] == code
    assert "[DONE]" not in events


def test_a_generation_that_just_ends_is_an_error(bpe_tokenizer: Tokenizer) -> None:
    async def script(_: Generation) -> AsyncIterator[Output]:
        yield Output((5,))

    response = ask(bpe_tokenizer, ScriptedService(script), "/v1/completions", TEXT)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "invariant_violation"


def test_no_address_leaves_the_front(bpe_tokenizer: Tokenizer) -> None:
    error = AttemptsExhausted("4 tries: tcp://10.0.0.7:5555 lost; shm://node-3/pool; peer 192.168.1.4:99 and 10.1.2.3")
    text = ask(bpe_tokenizer, ScriptedService(failing(error)), "/v1/completions", TEXT).text
    assert "4 tries" in text
    for secret in ("10.0.0.7", "5555", "node-3", "192.168", "10.1.2.3"):
        assert secret not in text


def test_every_error_of_the_tree_has_a_status() -> None:
    statuses = {code: status_of(kind("x")) for code, kind in ERRORS_BY_CODE.items()}
    assert statuses["model_not_found"] == 404
    assert statuses["payload_too_large"] == 413
    assert statuses["unsupported_field"] == 400
    assert {statuses[code] for code, kind in ERRORS_BY_CODE.items() if issubclass(kind, KVFerryError)} == {
        400, 401, 404, 413,
        415, 429, 500, 503, 504,
    }  # fmt: skip
