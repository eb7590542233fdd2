"""API keys: who is let in, who is told to wait, and what is refused before it is read."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from front_stage import CHAT, CONTEXT, MODEL, TEXT, ScriptedService, hanging, saying, serving
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigError, RateLimited, Unauthorized
from router.client import Client
from router.front.app import Front
from router.front.generation import Generation, Output
from router.front.keys import Gatekeeper, Key, hash_of, new_key, read_keys
from router.tokenizer import Tokenizer

ALICE, BOB = new_key(), new_key()
KEYS = (
    Key(name="alice", sha256=hash_of(ALICE)),
    Key(name="bob", sha256=hash_of(BOB), requests_per_minute=60.0, max_requests=2),
)
GUARDED = ["/v1/models", "/v1/models/x", "/metrics", "/cluster", "/cluster/events", "/version", "/openapi.json"]


def bearing(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService(saying((5,)), max_model_len=CONTEXT)


@pytest.fixture
def http(service: ScriptedService, bpe_tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    front = Front(service, bpe_tokenizer, gatekeeper=Gatekeeper(KEYS))
    with serving(front) as url, httpx.Client(base_url=url, trust_env=False) as client:
        yield client


def test_a_known_key_is_let_in_everywhere(http: httpx.Client) -> None:
    assert http.post("/v1/completions", json=TEXT, headers=bearing(ALICE)).status_code == 200
    assert http.post("/v1/chat/completions", json=CHAT, headers=bearing(ALICE)).status_code == 200
    for path in ("/v1/models", "/metrics", "/cluster"):
        assert http.get(path, headers={"authorization": f"bearer  {ALICE}"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearing("x"),
        bearing(ALICE[:-1]),
        bearing(ALICE + "x"),
        bearing(hash_of(ALICE)),
        {"authorization": ALICE},
        {"authorization": f"Basic {ALICE}"},
        {"authorization": b"Bearer \xff\xfe"},
        {"authorization": "Bearer " + "x" * 20_000},
        {"x-api-key": ALICE},
    ],
)
def test_anything_else_is_refused_everywhere(
    headers: dict[str, str], http: httpx.Client, service: ScriptedService
) -> None:
    asked = [http.post("/v1/completions", json=TEXT, headers=headers)]
    asked += [http.get(path, headers=headers) for path in GUARDED]
    for response in asked:
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        error = response.json()["error"]
        assert (error["code"], error["type"]) == ("unauthorized", "authentication_error")
        assert ALICE not in response.text
    assert service.generations == []


def test_probes_need_no_key(http: httpx.Client) -> None:
    for path in ("/health", "/ready", "/ping"):
        assert http.get(path).status_code == 200


def test_a_body_is_not_read_without_a_key(http: httpx.Client) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 4000000\r\n\r\n"
    place = ("127.0.0.1", http.base_url.port or 0)
    with socket.create_connection(place, timeout=10.0) as stranger:
        stranger.sendall(head + b'{"model": "')
        answer = b""
        while part := stranger.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 401 ")


def test_a_key_has_as_many_answers_at_a_time_as_it_may(bpe_tokenizer: Tokenizer) -> None:
    service = ScriptedService(hanging((5,)))
    front = Front(service, bpe_tokenizer, gatekeeper=Gatekeeper(KEYS))
    body = {**TEXT, "stream": True}
    with serving(front) as url, httpx.Client(base_url=url, trust_env=False) as http:
        with (
            http.stream("POST", "/v1/completions", json=body, headers=bearing(BOB)),
            http.stream("POST", "/v1/completions", json=body, headers=bearing(BOB)),
        ):
            service.wait("opened", 2)
            third = http.post("/v1/completions", json=TEXT, headers=bearing(BOB))
            assert third.status_code == 429
            assert third.headers["retry-after"] == "1"
            assert third.json()["error"]["code"] == "rate_limited"
            with http.stream("POST", "/v1/completions", json=body, headers=bearing(ALICE)) as other:
                assert other.status_code == 200
        service.wait("cancelled", 3)
        # What was left open counts no more.
        with http.stream("POST", "/v1/completions", json=body, headers=bearing(BOB)) as again:
            assert again.status_code == 200


def test_the_clients_show_their_key(bpe_tokenizer: Tokenizer, service: ScriptedService) -> None:
    front = Front(service, bpe_tokenizer, gatekeeper=Gatekeeper(KEYS))
    with serving(front) as url:
        with Client(url, api_key=ALICE) as client:
            assert client.complete("x").finish_reason == "length"
        with Client(url) as client, pytest.raises(Unauthorized):
            client.complete("x")
        with openai.OpenAI(base_url=url + "/v1", api_key=ALICE) as library:
            assert library.completions.create(model=MODEL, prompt="x").choices[0].finish_reason == "length"
        with (
            openai.OpenAI(base_url=url + "/v1", api_key="kvf-none", max_retries=0) as library,
            pytest.raises(openai.AuthenticationError),
        ):
            library.models.list()
    for bad in ("", " ", "schlüssel", "a\nb"):
        with pytest.raises(ConfigError, match="api_key"):
            Client("http://127.0.0.1:1", api_key=bad)


def test_requests_of_one_key_do_not_wait_for_anothers(bpe_tokenizer: Tokenizer) -> None:
    seen = threading.Event()

    async def script(generation: Generation) -> AsyncIterator[Output]:
        seen.set()
        yield Output((5,), "length")

    front = Front(ScriptedService(script), bpe_tokenizer, gatekeeper=Gatekeeper(KEYS))
    with serving(front) as url, httpx.Client(base_url=url, trust_env=False) as http:
        statuses = [http.post("/v1/completions", json=TEXT, headers=bearing(BOB)).status_code for _ in range(62)]
        assert statuses.count(429) >= 1
        assert http.post("/v1/completions", json=TEXT, headers=bearing(ALICE)).status_code == 200


@given(st.lists(st.floats(0.0, 30.0), min_size=1, max_size=200))
def test_no_minute_has_more_than_twice_its_rate_and_the_wait_that_is_told_suffices(gaps: list[float]) -> None:
    keeper = Gatekeeper([Key(name="a", sha256=hash_of("a"), requests_per_minute=10.0)])
    holder = keeper.check(b"Bearer a")
    now, taken = 0.0, []
    for gap in gaps:
        now += gap
        try:
            keeper.enter(holder, now)
        except RateLimited as error:
            now += error.retry_after + 1e-6
            keeper.enter(holder, now)
        keeper.leave(holder)
        taken.append(now)
        assert sum(moment > now - 60.0 for moment in taken) <= 20


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("keys: []", "keys"),
        ("keys: 5", "keys"),
        ("[", "keys"),
        ("keys: [{name: a}]", "sha256"),
        ("keys: [{name: a, sha256: abc}]", "sha256"),
        ("keys: [{name: a, sha256: %(hash)s, limit: 5}]", "limit"),
        ("keys: [{name: a, sha256: %(hash)s, max_requests: 0}]", "max_requests"),
        ("keys: [{name: a, sha256: %(hash)s, requests_per_minute: -1}]", "requests_per_minute"),
        ("keys: [{name: a, sha256: %(hash)s}, {name: b, sha256: %(hash)s}]", "stands twice"),
        ("keys: [{name: a, sha256: %(hash)s}, {name: a, sha256: %(other)s}]", "'a' stands twice"),
        ("!!python/object/apply:os.getpid []", "keys"),
    ],
)
def test_a_bad_file_is_refused_and_says_why(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text % {"hash": hash_of("a"), "other": hash_of("b")})
    with pytest.raises(ConfigError, match=said) as caught:
        read_keys(file)
    assert caught.value.field == "api_keys"


def test_a_file_is_read_whole_and_bounded(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys:\n- name: alice\n  sha256: {hash_of(ALICE)}\n  max_requests: 3\n")
    assert read_keys(file) == (Key(name="alice", sha256=hash_of(ALICE), max_requests=3),)
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(tmp_path / "none.yaml")
    with file.open("a") as more:
        more.write("#" * (5 << 20))
    with pytest.raises(ConfigError, match="bytes"):
        read_keys(file)


def test_keys_are_long_and_never_the_same() -> None:
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    assert all(key.startswith("kvf-") and len(key) > 40 for key in made)
