"""What the front makes of the requests that it takes."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from front_stage import (
    CHAT,
    CONTEXT,
    END_OF_TEXT,
    IM_END,
    MODEL,
    TEXT,
    ScriptedService,
    refused,
    saying,
    serving_front,
    taken,
    write_checkpoint,
)

from protocol.sampling import SamplingParams
from router.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def service() -> ScriptedService:
    return ScriptedService(saying((5,)), max_model_len=CONTEXT)


@pytest.fixture(scope="module")
def http(service: ScriptedService, bpe_tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    with serving_front(service, bpe_tokenizer) as url, httpx.Client(base_url=url, trust_env=False) as client:
        yield client


def test_defaults(http: httpx.Client, service: ScriptedService, bpe_tokenizer: Tokenizer) -> None:
    sampling = taken(http, service, "/v1/completions", TEXT)
    generation = service.generations[-1]
    assert generation.token_ids == bpe_tokenizer.encode("the ferry")
    assert (generation.cache_salt, generation.timeout) == ("", None)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (16, 1.0, 1.0, 0)
    assert sampling.stop_token_ids == (IM_END, END_OF_TEXT)
    sampling = taken(http, service, "/v1/chat/completions", CHAT)
    generation = service.generations[-1]
    assert generation.token_ids == bpe_tokenizer.encode_chat(CHAT["messages"])
    assert sampling.max_tokens == CONTEXT - len(generation.token_ids)


def test_every_field_arrives(http: httpx.Client, service: ScriptedService) -> None:
    fields = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "seed": 42,
        "min_tokens": 3,
        "stop_token_ids": [9, IM_END, 11],
        "cache_salt": "tenant",
        "timeout": 2.5,
    }
    expected = SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        seed=42,
        max_tokens=9,
        min_tokens=3,
        stop_token_ids=(IM_END, END_OF_TEXT, 9, 11),
    )
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        assert taken(http, service, path, {**body, **fields}) == expected
        assert (service.generations[-1].cache_salt, service.generations[-1].timeout) == ("tenant", 2.5)


def test_no_field_of_the_sampling_is_out_of_reach(http: httpx.Client, service: ScriptedService) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {"4": 1.5},
        "seed": 42,
        "max_tokens": 9,
        "min_tokens": 3,
        "stop_token_ids": [9],
        "response_format": {"type": "json_object"},
    }
    plain = SamplingParams()
    told = {"/v1/completions": {"logprobs": 2}, "/v1/chat/completions": {"logprobs": True, "top_logprobs": 2}}
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        found = taken(http, service, path, {**body, **fields, **told[path]})
        left = [name for name in plain.__struct_fields__ if getattr(found, name) == getattr(plain, name)]
        assert left == [], f"{path} leaves these as they are"


def test_ignore_eos_keeps_only_the_clients_ids(http: httpx.Client, service: ScriptedService) -> None:
    assert taken(http, service, "/v1/completions", {**TEXT, "ignore_eos": True}).stop_token_ids == ()
    body = {**TEXT, "ignore_eos": True, "stop_token_ids": [9]}
    assert taken(http, service, "/v1/completions", body).stop_token_ids == (9,)


def test_seed_is_drawn_anew_without_one(http: httpx.Client, service: ScriptedService) -> None:
    seeds = {taken(http, service, "/v1/completions", TEXT).seed for _ in range(3)}
    assert len(seeds) == 3
    assert taken(http, service, "/v1/completions", {**TEXT, "seed": -1}).seed == (1 << 63) - 1


def test_max_completion_tokens_goes_before_max_tokens(http: httpx.Client, service: ScriptedService) -> None:
    body = {**CHAT, "max_tokens": 4, "max_completion_tokens": 6}
    assert taken(http, service, "/v1/chat/completions", body).max_tokens == 6
    assert taken(http, service, "/v1/chat/completions", {**CHAT, "max_tokens": 4}).max_tokens == 4


def test_context_is_filled_to_its_last_token(http: httpx.Client, service: ScriptedService) -> None:
    body = {"model": MODEL, "prompt": [5] * 120}
    assert taken(http, service, "/v1/completions", body).max_tokens == 8
    assert taken(http, service, "/v1/completions", {**body, "max_tokens": 8}).max_tokens == 8
    assert taken(http, service, "/v1/completions", {"model": MODEL, "prompt": [5] * 127}).max_tokens == 1


def test_fields_that_ask_for_nothing_are_taken(http: httpx.Client, service: ScriptedService) -> None:
    neutral = {
        "n": 1,
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logprobs": None,
        "response_format": {"type": "text"},
        "user": "someone",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "unknown_field": [1, {"deep": None}],
        "max_tokens": None,
        "temperature": None,
        "stop": None,
        "stream": None,
        "stream_options": None,
    }
    taken(http, service, "/v1/completions", {**TEXT, **neutral, "best_of": 1, "echo": False, "suffix": None})
    extra = {"logprobs": False, "top_logprobs": None, "tools": [], "tool_choice": "none", "parallel_tool_calls": True}
    taken(http, service, "/v1/chat/completions", {**CHAT, **neutral, **extra})


def test_roles_and_parts(http: httpx.Client, service: ScriptedService, bpe_tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    taken(http, service, "/v1/chat/completions", {"model": MODEL, "messages": messages})
    plain = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "one\ntwo"}]
    assert service.generations[-1].token_ids == bpe_tokenizer.encode_chat(plain)


def test_long_text_is_taken(bpe_tokenizer: Tokenizer) -> None:
    """Long enough to be tokenised in a thread."""
    service = ScriptedService(saying((5,)), max_model_len=100_000)
    text = "the ferry carries the blocks " * 4_000
    with serving_front(service, bpe_tokenizer) as url, httpx.Client(base_url=url, trust_env=False) as http:
        taken(http, service, "/v1/completions", {"model": MODEL, "prompt": text})
        message = http.post("/v1/completions", json={"model": MODEL, "prompt": [text, ""]}).json()["error"]
    assert service.generations[0].token_ids == bpe_tokenizer.encode(text)
    assert message["param"] == "prompt[1]"


def test_without_workers_the_checkpoint_tells_the_context(bpe_tokenizer: Tokenizer) -> None:
    service = ScriptedService(saying((5,)), max_model_len=None)
    with serving_front(service, bpe_tokenizer) as url, httpx.Client(base_url=url, trust_env=False) as http:
        taken(http, service, "/v1/chat/completions", CHAT)
        generation = service.generations[-1]
        assert generation.sampling.max_tokens == 256 - len(generation.token_ids)


def test_chat_without_a_template(tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = Tokenizer(write_checkpoint(tmp_path_factory.mktemp("plain"), chat_template=None))
    service = ScriptedService(saying((5,)))
    with serving_front(service, tokenizer) as url, httpx.Client(base_url=url, trust_env=False) as http:
        assert "no chat template" in refused(
            http.post("/v1/chat/completions", json=CHAT), 400, "invalid_request", "messages"
        )
        taken(http, service, "/v1/completions", TEXT)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_names_no_worker_block_address_or_lease(
    http: httpx.Client, service: ScriptedService, path: str
) -> None:
    body = {**(TEXT if path == "/v1/completions" else CHAT), "seed": 1}
    taken(http, service, path, body)
    plain = service.generations[-1]
    wishes = {
        "worker": "decode-0",
        "prefill_worker": "prefill-0",
        "decode_worker": "decode-0",
        "blocks": [1, 2, 3],
        "block_ids": [1],
        "address": "tcp://10.0.0.1:7000",
        "kv_address": "tcp://10.0.0.1:7000",
        "ticket": "00" * 16,
        "lease": "lease-1",
        "request_id": "r-1",
        "attempt": 7,
        "handoff": {"peer": ["decode-0", 1]},
        "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [1], "remote_host": "10.0.0.1"},
    }
    taken(http, service, path, {**body, **wishes})
    assert service.generations[-1] == plain
