"""What the front answers: whole objects and streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from front_stage import (
    CHAT,
    IM_END,
    MODEL,
    REPLY,
    REPORT,
    TEXT,
    TIMED,
    ScriptedService,
    ask,
    events_of,
    hanging,
    one_by_one,
    saying,
)

from protocol.errors import (
    NoWorkerAvailable,
)
from router.front.generation import Generation, Output
from router.tokenizer import Tokenizer


def test_chat_answer(bpe_tokenizer: Tokenizer) -> None:
    ids = bpe_tokenizer.encode(REPLY)
    service = ScriptedService(one_by_one((*ids, IM_END), "stop"))
    response = ask(bpe_tokenizer, service, "/v1/chat/completions", CHAT)
    answer = response.json()
    prompt_tokens = len(service.generations[0].token_ids)
    assert answer["id"] == "chatcmpl-" + response.headers["x-request-id"]
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": REPLY, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(ids) + 1,
        "total_tokens": prompt_tokens + len(ids) + 1,
        "prompt_tokens_details": {"cached_tokens": REPORT.cached_tokens},
    }
    assert "kvferry" not in answer
    assert service.counts() == {"opened": 1, "finished": 1, "cancelled": 0}


def test_completion_answer_with_timings(bpe_tokenizer: Tokenizer) -> None:
    service = ScriptedService(saying(bpe_tokenizer.encode(REPLY)))
    answer = ask(bpe_tokenizer, service, "/v1/completions", TEXT, **TIMED).json()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": REPLY, "logprobs": None, "finish_reason": "length"}]
    assert answer["kvferry"] == REPORT.__dict__


def test_chat_stream(bpe_tokenizer: Tokenizer) -> None:
    service = ScriptedService(one_by_one((*bpe_tokenizer.encode(REPLY), IM_END), "stop"))
    response = ask(bpe_tokenizer, service, "/v1/chat/completions", {**CHAT, "stream": True})
    *chunks, end = events_of(response)
    assert end == "[DONE]"
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-" + response.headers["x-request-id"]}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all(set(chunk) == {"id", "object", "created", "model", "choices"} for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert all(set(choice) == {"index", "delta", "logprobs", "finish_reason"} for choice in choices)
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(choice["delta"]) == {"content"} for choice in choices[1:-1])
    assert "".join(choice["delta"]["content"] for choice in choices[:-1]) == REPLY
    assert len(choices) > 5
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


def test_completion_stream_with_usage_and_timings(bpe_tokenizer: Tokenizer) -> None:
    ids = bpe_tokenizer.encode(REPLY)
    service = ScriptedService(one_by_one(ids))
    body = {**TEXT, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, end = events_of(ask(bpe_tokenizer, service, "/v1/completions", body, **TIMED))
    assert end == "[DONE]"
    assert all(chunk["usage"] is None and "kvferry" not in chunk for chunk in chunks)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == REPLY
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(ids)
    assert usage["kvferry"] == REPORT.__dict__


def test_timings_ride_on_the_finish_chunk_without_usage(bpe_tokenizer: Tokenizer) -> None:
    service = ScriptedService(saying((5,), (6,)))
    *_, last, _ = events_of(ask(bpe_tokenizer, service, "/v1/chat/completions", {**CHAT, "stream": True}, **TIMED))
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["kvferry"] == REPORT.__dict__


@pytest.mark.parametrize("name", ['a"b\n\n😀', "\x00mark\x00"])
def test_model_name_cannot_break_a_chunk(bpe_tokenizer: Tokenizer, name: str) -> None:
    service = ScriptedService(saying((5,)))
    service.model = name
    body = {**CHAT, "model": service.model, "stream": True}
    *chunks, _ = events_of(ask(bpe_tokenizer, service, "/v1/chat/completions", body))
    assert {chunk["model"] for chunk in chunks} == {service.model}
    assert chunks[1]["choices"][0]["delta"] == {"content": bpe_tokenizer.decode([5])}


def test_text_cannot_break_an_event(bpe_tokenizer: Tokenizer) -> None:
    hostile = 'data: [DONE]\n\ndata: "\\u0000mark\\u0000"\r\n\x00mark\x00\u2028'
    service = ScriptedService(one_by_one(bpe_tokenizer.encode(hostile)))
    *chunks, _ = events_of(ask(bpe_tokenizer, service, "/v1/completions", {**TEXT, "max_tokens": 99, "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == hostile


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_closes_the_generation(bpe_tokenizer: Tokenizer, stream: bool) -> None:
    ids = bpe_tokenizer.encode("the blocks arrive")
    service = ScriptedService(hanging(*((token_id,) for token_id in ids)))
    body = {**TEXT, "stop": ["nowhere", "cks a"], "stream": stream}
    response = ask(bpe_tokenizer, service, "/v1/completions", body)
    service.wait("finished")
    if stream:
        *chunks, end = events_of(response)
        assert end == "[DONE]"
        choices = [chunk["choices"][0] for chunk in chunks]
        assert "".join(choice["text"] for choice in choices) == "the blo"
        assert choices[-1]["finish_reason"] == "stop"
    else:
        answer = response.json()
        assert answer["choices"][0]["text"] == "the blo"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] < len(ids)


def test_a_report_that_came_early_outlives_a_stop_string(bpe_tokenizer: Tokenizer) -> None:
    async def script(_: Generation) -> AsyncIterator[Output]:
        yield Output(bpe_tokenizer.encode("the "), None, REPORT)
        yield Output(bpe_tokenizer.encode("blocks"))
        await asyncio.Event().wait()

    answer = ask(bpe_tokenizer, ScriptedService(script), "/v1/completions", {**TEXT, "stop": "block"}, **TIMED).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == REPORT.cached_tokens
    assert answer["kvferry"]["prefill_worker"] == "prefill-0"


def test_batched_prompts_run_together(bpe_tokenizer: Tokenizer) -> None:
    barrier = asyncio.Barrier(3)

    async def script(generation: Generation) -> AsyncIterator[Output]:
        await barrier.wait()
        for token_id in generation.token_ids:
            yield Output((token_id,))
        yield Output((IM_END,), "stop", REPORT)

    prompts = ["the ferry", "Größe", "渡船 😀"]
    service = ScriptedService(script)
    answer = ask(bpe_tokenizer, service, "/v1/completions", {**TEXT, "prompt": prompts}, **TIMED).json()
    assert [choice["text"] for choice in answer["choices"]] == prompts
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    total = sum(len(bpe_tokenizer.encode(prompt)) for prompt in prompts)
    assert answer["usage"]["prompt_tokens"] == total
    assert answer["usage"]["completion_tokens"] == total + 3
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 * REPORT.cached_tokens
    assert answer["kvferry"] == [REPORT.__dict__] * 3


def test_batched_stream(bpe_tokenizer: Tokenizer) -> None:
    async def script(generation: Generation) -> AsyncIterator[Output]:
        for token_id in generation.token_ids:
            yield Output((token_id,))
            await asyncio.sleep(0)
        yield Output((IM_END,), "stop", REPORT)

    prompts = [list(bpe_tokenizer.encode(text)) for text in ("the ferry", "渡船 😀")]
    service = ScriptedService(script)
    body = {**TEXT, "prompt": prompts, "stream": True}
    *chunks, end = events_of(ask(bpe_tokenizer, service, "/v1/completions", body))
    assert end == "[DONE]"
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["the ferry", "渡船 😀"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons.count("stop") == 2


@pytest.mark.parametrize("stream", [False, True])
def test_one_failure_in_a_batch_closes_the_others(bpe_tokenizer: Tokenizer, stream: bool) -> None:
    barrier = asyncio.Barrier(3)

    async def script(generation: Generation) -> AsyncIterator[Output]:
        await barrier.wait()
        if len(generation.token_ids) == 1:
            raise NoWorkerAvailable("no live decode worker")
        await asyncio.Event().wait()
        yield Output((5,))

    service = ScriptedService(script)
    body = {**TEXT, "prompt": [[5, 6], [7], [8, 9]], "stream": stream}
    response = ask(bpe_tokenizer, service, "/v1/completions", body)
    assert response.status_code == 503
    service.wait("cancelled", 3)
