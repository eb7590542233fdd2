"""Routes beside the two that generate, and what every answer carries."""

from __future__ import annotations

import threading
from importlib.metadata import version

import httpx
import pytest
from front_stage import (
    MODEL,
    TEXT,
    ScriptedService,
    ask,
    saying,
    serving_front,
)

from router.tokenizer import Tokenizer


def test_request_ids(bpe_tokenizer: Tokenizer) -> None:
    service = ScriptedService(saying((5,)))
    with serving_front(service, bpe_tokenizer) as url, httpx.Client(base_url=url, trust_env=False) as http:
        first = http.post("/v1/completions", json=TEXT, headers={"x-request-id": "mine"})
        second = http.post("/v1/completions", json=TEXT, headers={"x-request-id": "mine"})
        assert first.headers["x-request-id"] != second.headers["x-request-id"]
        assert "mine" not in first.headers["x-request-id"]
        assert first.headers["x-client-request-id"] == "mine"
        long = http.get("/v1/models", headers={"x-request-id": "x" * 500})
        assert long.headers["x-client-request-id"] == "x" * 128
        strange = http.get("/v1/models", headers={"x-request-id": b"a b\xc3\xa9c"})
        assert strange.headers["x-client-request-id"] == "abc"
        assert "x-client-request-id" not in http.get("/v1/models").headers


def test_other_routes(bpe_tokenizer: Tokenizer) -> None:
    service = ScriptedService(saying((5,)))
    with serving_front(service, bpe_tokenizer) as url, httpx.Client(base_url=url, trust_env=False) as http:
        models = http.get("/v1/models").json()
        assert models["object"] == "list"
        assert models["data"][0]["id"] == MODEL
        assert models["data"][0]["max_model_len"] == 128
        assert http.get(f"/v1/models/{MODEL}").json() == models["data"][0]
        assert http.get("/v1/models/acme%2Ftiny").json() == models["data"][0]
        missing = http.get("/v1/models/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        for path in ("/health", "/ready", "/ping"):
            health = http.get(path)
            assert (health.status_code, health.json()["ready"]) == (200, True)
        metrics = http.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain; version=")
        assert metrics.content == service.metrics()
        assert http.get("/cluster").json() == service.cluster()
        assert http.get("/version").json() == {"version": version("kvferry")}
        head = http.head("/health")
        assert (head.status_code, head.content) == (200, b"")


def test_a_scrape_that_takes_long_holds_nobody_up(bpe_tokenizer: Tokenizer) -> None:
    begun, may_end = threading.Event(), threading.Event()

    class Slow(ScriptedService):
        def metrics(self) -> bytes:
            begun.set()
            assert may_end.wait(60.0)
            return super().metrics()

    with serving_front(Slow(saying((5,))), bpe_tokenizer) as url, httpx.Client(base_url=url, trust_env=False) as http:
        scraped: list[int] = []
        scrape = threading.Thread(
            target=lambda: scraped.append(httpx.get(f"{url}/metrics", trust_env=False, timeout=20.0).status_code)
        )
        scrape.start()
        assert begun.wait(60.0)
        try:
            assert http.post("/v1/completions", json=TEXT).status_code == 200
        finally:
            may_end.set()
            scrape.join()
        assert scraped == [200]


def test_unhealthy(bpe_tokenizer: Tokenizer) -> None:
    service = ScriptedService(saying((5,)), ready=False)
    with serving_front(service, bpe_tokenizer) as url, httpx.Client(base_url=url, trust_env=False) as http:
        for path in ("/health", "/ready", "/ping"):
            assert http.get(path).status_code == 503


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/status", 404, "not_found"),
        ("POST", "/", 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/v1/models/", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/acme/tiny", 405, "method_not_allowed"),
        ("POST", "/metrics", 405, "method_not_allowed"),
    ],
)
def test_no_such_route(bpe_tokenizer: Tokenizer, method: str, path: str, status: int, code: str) -> None:
    with (
        serving_front(ScriptedService(saying((5,))), bpe_tokenizer) as url,
        httpx.Client(base_url=url, trust_env=False) as http,
    ):
        response = http.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert ("allow" in response.headers) == (status == 405)


def test_no_thread_is_left(bpe_tokenizer: Tokenizer) -> None:
    before = set(threading.enumerate())
    ask(bpe_tokenizer, ScriptedService(saying((5,))), "/v1/completions", {**TEXT, "user": "x" * 40_000})
    assert set(threading.enumerate()) <= before
