"""/tokenize and /detokenize: what transformers' tokenizer says, in vLLM's shapes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from front_stage import (
    CHAT,
    CONTEXT,
    IM_END,
    LINES,
    MODEL,
    ScriptedService,
    hanging,
    refused,
    saying,
    serving,
    serving_front,
    write_checkpoint,
)

from router.front.app import LONG_BODY_BYTES, Front
from router.front.config import FrontConfig
from router.front.keys import Gatekeeper, Key, hash_of
from router.tokenizer import Tokenizer

MESSAGES = CHAT["messages"]


@pytest.fixture(scope="module")
def http(bpe_tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    service = ScriptedService(saying((5,)), max_model_len=CONTEXT)
    with serving_front(service, bpe_tokenizer) as url, httpx.Client(base_url=url, trust_env=False) as client:
        yield client
    assert service.counts()["opened"] == 0


@pytest.fixture(scope="module")
def reference(bpe_checkpoint: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bpe_checkpoint)


def told(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    found = response.json()
    assert isinstance(found, dict)
    return found


def test_a_prompt(http: httpx.Client, reference: Any) -> None:
    for text in (*LINES, "a <|im_end|>", ""):
        answer = told(http.post("/tokenize", json={"prompt": text}))
        ids = reference(text)["input_ids"]
        assert answer == {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids, "token_strs": None}
        named = told(http.post("/tokenize", json={"model": MODEL, "prompt": text, "return_token_strs": True}))
        assert named == {**answer, "token_strs": reference.convert_ids_to_tokens(ids)}
        assert told(http.post("/detokenize", json={"tokens": ids})) == {"prompt": text}


def test_a_chat(http: httpx.Client, reference: Any) -> None:
    for generation_prompt in (True, False):
        body = {"messages": MESSAGES, "add_generation_prompt": generation_prompt}
        expected = reference.apply_chat_template(MESSAGES, add_generation_prompt=generation_prompt, return_dict=False)
        assert told(http.post("/tokenize", json=body))["tokens"] == expected
    # What a chat is made of is what /tokenize says.
    assert told(http.post("/tokenize", json={"messages": MESSAGES}))["tokens"] == reference.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )


def test_what_a_tokenizer_puts_around_a_text(tmp_path: Path) -> None:
    import tokenizers
    from tokenizers import processors

    path = write_checkpoint(tmp_path)
    plain = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    plain.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", IM_END)]
    )
    plain.save(str(path / "tokenizer.json"))
    service = ScriptedService(saying((5,)))
    with serving_front(service, Tokenizer(path)) as url, httpx.Client(base_url=url, trust_env=False) as http:
        for body, default in (({"prompt": "ab"}, True), ({"messages": MESSAGES}, False)):
            bare = told(http.post("/tokenize", json={**body, "add_special_tokens": False}))["tokens"]
            full = told(http.post("/tokenize", json={**body, "add_special_tokens": True}))["tokens"]
            assert full == [*bare, IM_END]
            assert told(http.post("/tokenize", json=body))["tokens"] == (full if default else bare)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [5, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [5, 100000]}, "tokens[1]"),
    ],
)
def test_what_is_wrong_is_named(path: str, body: dict[str, Any], param: str, http: httpx.Client) -> None:
    refused(http.post(path, json=body), 400, "invalid_request", param)


def test_what_is_not_served_is_refused(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "continue_final_message": True}
    refused(http.post("/tokenize", json=body), 400, "unsupported_field", "continue_final_message")
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        refused(http.post(path, json={**body, "model": "other"}), 404, "model_not_found", "model")
        assert http.get(path).status_code == 405
        refused(http.post(path, content=b"{"), 400, "invalid_request", None)


def test_bodies_are_bounded(bpe_tokenizer: Tokenizer) -> None:
    service = ScriptedService(saying((5,)))
    config = FrontConfig(max_body_bytes=64)
    with serving_front(service, bpe_tokenizer, config) as url, httpx.Client(base_url=url, trust_env=False) as http:
        refused(http.post("/tokenize", json={"prompt": "a" * 64}), 413, "payload_too_large", None)
        refused(http.post("/detokenize", json={"tokens": [5] * 64}), 413, "payload_too_large", None)


def test_they_want_a_key_and_count_against_it(bpe_tokenizer: Tokenizer) -> None:
    keeper = Gatekeeper([Key(name="a", sha256=hash_of("kvf-a"), max_requests=1)])
    service = ScriptedService(hanging((5,)))
    mine = {"authorization": "Bearer kvf-a"}
    with (
        serving(Front(service, bpe_tokenizer, gatekeeper=keeper)) as url,
        httpx.Client(base_url=url, trust_env=False) as http,
    ):
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
            assert http.post(path, json=body).status_code == 401
            assert http.post(path, json=body, headers=mine).status_code == 200
            with http.stream(
                "POST", "/v1/completions", json={"model": MODEL, "prompt": "a", "stream": True}, headers=mine
            ) as open_answer:
                assert open_answer.status_code == 200
                assert http.post(path, json=body, headers=mine).status_code == 429
            service.wait("cancelled", service.counts()["opened"])


def test_a_long_text_does_not_hold_up_the_others(bpe_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    encode = bpe_tokenizer.encode

    def slow(text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        if len(text) >= LONG_BODY_BYTES:
            begun.set()
            assert go_on.wait(60.0)
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(bpe_tokenizer, "encode", slow)
    service = ScriptedService(saying((5,)))
    answers: list[dict[str, Any]] = []
    with serving_front(service, bpe_tokenizer) as url, httpx.Client(base_url=url, trust_env=False) as http:
        long = threading.Thread(
            target=lambda: answers.append(told(http.post("/tokenize", json={"prompt": "ab " * LONG_BODY_BYTES})))
        )
        long.start()
        try:
            assert begun.wait(60.0)
            assert told(http.post("/tokenize", json={"prompt": "ab"}))["count"] > 0
        finally:
            go_on.set()
            long.join()
    assert answers[0]["count"] > LONG_BODY_BYTES
