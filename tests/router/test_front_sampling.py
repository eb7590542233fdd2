"""Sampling fields reach the workers as they were meant, and log-probabilities come back as OpenAI shows them."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from front_stage import (
    CHAT,
    CONTEXT,
    MODEL,
    REPLY,
    TEXT,
    ScriptedService,
    ask,
    events_of,
    refused,
    saying,
    serving_front,
)

from protocol.sampling import SamplingParams, TokenLogprobs
from router.front.generation import Generation, Output
from router.tokenizer import Tokenizer

PATHS = {"/v1/completions": TEXT, "/v1/chat/completions": CHAT}


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService(saying((5,)), max_model_len=CONTEXT)


@pytest.fixture
def http(service: ScriptedService, bpe_tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    with serving_front(service, bpe_tokenizer) as url, httpx.Client(base_url=url, trust_env=False) as client:
        yield client


@pytest.mark.parametrize("path", PATHS)
def test_each_field_arrives(path: str, http: httpx.Client, service: ScriptedService) -> None:
    fields = {
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "presence_penalty": -0.5,
        "frequency_penalty": 1.5,
        "logit_bias": {"7": -100, "05": 2.5},
    }
    assert http.post(path, json={**PATHS[path], **fields}).status_code == 200
    found = service.generations[-1].sampling
    assert (found.min_p, found.repetition_penalty) == (0.05, 1.2)
    assert (found.presence_penalty, found.frequency_penalty) == (-0.5, 1.5)
    assert found.logit_bias == ((5, 2.5), (7, -100.0))
    assert found.logprobs is None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("given", [{}, {"priority": None}, {"priority": 0}, {"priority": -7}])
def test_a_priority_arrives(path: str, given: dict[str, Any], http: httpx.Client, service: ScriptedService) -> None:
    assert http.post(path, json={**PATHS[path], **given}).status_code == 200
    assert service.generations[-1].priority == (given.get("priority") or 0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("n", 0, "n"),
        ("n", True, "n"),
        ("n", 1000, "n"),
        ("n", "2", "n"),
        ("min_p", 1.5, "min_p"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("presence_penalty", 2.1, "presence_penalty"),
        ("frequency_penalty", "much", "frequency_penalty"),
        ("logit_bias", {"five": 1}, "logit_bias"),
        ("logit_bias", {"5": 101}, "logit_bias"),
        ("logit_bias", {"9999999": 1}, "logit_bias"),
        ("logit_bias", {"5": None}, "logit_bias"),
        ("logit_bias", {"5": "1"}, "logit_bias"),
        ("logit_bias", [5], "logit_bias"),
        ("prompt_logprobs", -1, "prompt_logprobs"),
        ("prompt_logprobs", 21, "prompt_logprobs"),
        ("prompt_logprobs", True, "prompt_logprobs"),
    ],
)
def test_each_value_out_of_range_is_named(path: str, field: str, value: Any, param: str, http: httpx.Client) -> None:
    response = http.post(path, json={**PATHS[path], field: value})
    refused(response, 400, "invalid_request", param)


@pytest.mark.parametrize(
    ("path", "fields", "code", "param"),
    [
        ("/v1/completions", {"logprobs": True}, "invalid_request", "logprobs"),
        ("/v1/completions", {"logprobs": 21}, "invalid_request", "logprobs"),
        ("/v1/completions", {"best_of": 2, "n": 3}, "invalid_request", "best_of"),
        ("/v1/completions", {"best_of": 0}, "invalid_request", "best_of"),
        ("/v1/completions", {"best_of": "2"}, "invalid_request", "best_of"),
        ("/v1/completions", {"best_of": 65}, "invalid_request", "best_of"),
        ("/v1/completions", {"best_of": 3, "n": 2, "stream": True}, "invalid_request", "best_of"),
        ("/v1/completions", {"echo": "yes"}, "invalid_request", "echo"),
        ("/v1/completions", {"echo": True, "max_tokens": -1}, "invalid_request", "max_tokens"),
        ("/v1/completions", {"n": 40, "prompt": ["a", "b"]}, "invalid_request", "n"),
        ("/v1/chat/completions", {"logprobs": 1}, "invalid_request", "logprobs"),
        ("/v1/chat/completions", {"top_logprobs": 2}, "invalid_request", "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "invalid_request", "top_logprobs"),
    ],
)
def test_fields_of_one_path(path: str, fields: dict[str, Any], code: str, param: str, http: httpx.Client) -> None:
    refused(http.post(path, json={**PATHS[path], **fields}), 400, code, param)


def test_n_choices_of_a_prompt_are_drawn_apart_and_the_prompt_counts_once(
    http: httpx.Client, service: ScriptedService
) -> None:
    body = {"model": MODEL, "prompt": [[5, 6], [7]], "n": 3, "best_of": 3, "seed": 40}
    answer = http.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 6
    seeds = {tuple(found.token_ids): set() for found in service.generations}
    for found in service.generations:
        seeds[tuple(found.token_ids)].add(found.sampling.seed)
    assert seeds == {(5, 6): {40, 41, 42}, (7,): {40, 41, 42}}


def test_choices_of_a_prompt_are_asked_for_together(bpe_tokenizer: Tokenizer) -> None:
    service = ScriptedService(saying((5,)))
    body = {"model": MODEL, "prompt": [[5, 6], [7]], "n": 3, "cache_salt": "mine"}
    answer = ask(bpe_tokenizer, service, "/v1/completions", body)
    assert len(answer.json()["choices"]) == 6
    assert [[each.token_ids for each in group] for group in service.groups] == [[(5, 6)] * 3, [(7,)] * 3]
    for group in service.groups:
        assert len({each.sampling.seed for each in group}) == 3
        assert {each.cache_salt for each in group} == {"mine"}


def telling(ids: tuple[int, ...], groups: int, reason: str) -> ScriptedService:
    """Says ``ids`` in groups, each token with a log-probability of its own and two alternatives."""
    values = [TokenLogprobs(-float(index), ((token, -float(index)), (300, -9.5))) for index, token in enumerate(ids)]

    async def script(_: Generation) -> AsyncIterator[Output]:
        size = -(-len(ids) // groups)
        for first in range(0, len(ids), size):
            last = first + size >= len(ids)
            yield Output(
                ids[first : first + size],
                reason if last else None,  # type: ignore[arg-type]
                logprobs=tuple(values[first : first + size]),
            )

    return ScriptedService(script)


@pytest.mark.parametrize("groups", [1, 4, 100])
def test_log_probabilities_of_a_completion(groups: int, bpe_tokenizer: Tokenizer) -> None:
    ids = bpe_tokenizer.encode(REPLY)
    service = telling(ids, groups, "length")
    body = {**TEXT, "max_tokens": len(ids), "logprobs": 2}
    found = ask(bpe_tokenizer, service, "/v1/completions", body).json()["choices"][0]
    assert service.generations[0].sampling.logprobs == 2
    told = found["logprobs"]
    assert told["token_logprobs"] == [-float(index) for index in range(len(ids))]
    assert len(told["top_logprobs"]) == len(told["tokens"]) == len(ids)
    raw = b"".join(bpe_tokenizer.token_bytes(token) for token in ids)
    assert raw.decode() == found["text"] == REPLY
    whole = [token for token in told["tokens"] if not token.startswith("bytes:")]
    assert all(token in REPLY for token in whole)
    assert told["text_offset"] == sorted(told["text_offset"])
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert token.startswith("bytes:") or REPLY[offset:].startswith(token)
    streamed = ask(bpe_tokenizer, telling(ids, groups, "length"), "/v1/completions", {**body, "stream": True})
    parts = [event["choices"][0]["logprobs"] for event in events_of(streamed)[:-1] if event["choices"]]
    for name, values in told.items():
        assert [value for part in parts if part is not None for value in part[name]] == values


def test_log_probabilities_of_a_chat_leave_the_stop_token_out(bpe_tokenizer: Tokenizer) -> None:
    ids = (*bpe_tokenizer.encode(REPLY), 2)
    body = {**CHAT, "max_tokens": len(ids), "logprobs": True, "top_logprobs": 2}
    service = telling(ids, 5, "stop")
    choice = ask(bpe_tokenizer, service, "/v1/chat/completions", body).json()["choices"][0]
    assert service.generations[0].sampling.logprobs == 2
    content = choice["logprobs"]["content"]
    assert len(content) == len(ids) - 1
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == REPLY
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * (len(ids) - 1)
    streamed = ask(bpe_tokenizer, telling(ids, 5, "stop"), "/v1/chat/completions", {**body, "stream": True})
    parts = [event["choices"][0]["logprobs"] for event in events_of(streamed)[:-1]]
    assert [entry for part in parts if part for entry in part["content"]] == content


def test_log_probabilities_end_with_the_stop_string(bpe_tokenizer: Tokenizer) -> None:
    ids = bpe_tokenizer.encode(REPLY)
    stop = REPLY[4:10]
    body = {**TEXT, "max_tokens": len(ids), "logprobs": 0, "stop": stop}
    choice = ask(bpe_tokenizer, telling(ids, 1, "length"), "/v1/completions", body).json()["choices"][0]
    assert choice["text"] == REPLY[:4]
    assert choice["finish_reason"] == "stop"
    assert stop in "".join(choice["logprobs"]["tokens"])
    assert len(choice["logprobs"]["tokens"]) < len(ids)


def test_a_token_that_is_none_of_the_best_is_shown_beside_them(bpe_tokenizer: Tokenizer) -> None:
    async def script(_: Generation) -> AsyncIterator[Output]:
        yield Output((70,), "length", logprobs=(TokenLogprobs(-5.0, ((71, -0.5), (72, -1.0))),))

    answer = ask(bpe_tokenizer, ScriptedService(script), "/v1/completions", {**TEXT, "logprobs": 2}).json()
    told = answer["choices"][0]["logprobs"]
    assert list(told["top_logprobs"][0].values()) == [-0.5, -1.0, -5.0]
    assert told["top_logprobs"][0][told["tokens"][0]] == -5.0
    none = ask(bpe_tokenizer, ScriptedService(saying((5,))), "/v1/completions", TEXT).json()
    assert none["choices"][0]["logprobs"] is None


def test_what_json_cannot_say_is_bounded(bpe_tokenizer: Tokenizer) -> None:
    async def script(_: Generation) -> AsyncIterator[Output]:
        yield Output((5,), "length", logprobs=(TokenLogprobs(-math.inf, ((6, -math.inf),)),))

    body = {**TEXT, "logprobs": 1}
    choice = ask(bpe_tokenizer, ScriptedService(script), "/v1/completions", body).json()["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0]
    assert set(choice["logprobs"]["top_logprobs"][0].values()) == {-9999.0}


def test_every_token_spells_its_bytes(bpe_tokenizer: Tokenizer) -> None:
    text = "é渡 ferry\n😀"
    ids = bpe_tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(bpe_tokenizer.token_bytes(token) for token in ids).decode() == text
    assert bpe_tokenizer.token_bytes(bpe_tokenizer.eos_token_ids[0]).startswith(b"<|")
    assert bpe_tokenizer.token_bytes(1 << 20) == b""


def test_sampling_that_asks_for_nothing_is_small_on_the_wire() -> None:
    import msgspec

    assert len(msgspec.msgpack.encode(SamplingParams())) == 1
