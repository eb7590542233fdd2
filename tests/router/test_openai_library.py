"""The ``openai`` package, unmodified, against the front."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
from front_stage import (
    IM_END,
    MODEL,
    REPORT,
    ScriptedService,
    failing,
    hanging,
    one_by_one,
    serving_front,
)
from pydantic import BaseModel
from test_front_prompts import PROMPT, telling
from test_front_tools import ARGUMENTS, CALL, service_saying

from protocol.errors import NoWorkerAvailable, Overloaded, WorkerLost
from router.front.generation import Generation, Output
from router.tokenizer import Tokenizer

REPLY = "the blocks arrive 渡船 😀"
MESSAGES = [{"role": "user", "content": "the ferry"}]


@pytest.fixture
def replying(bpe_tokenizer: Tokenizer) -> ScriptedService:
    return ScriptedService(one_by_one((*bpe_tokenizer.encode(REPLY), IM_END), "stop"))


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


def test_chat(bpe_tokenizer: Tokenizer, replying: ScriptedService) -> None:
    with serving_front(replying, bpe_tokenizer) as url, client_of(url) as client:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=1, temperature=0.0)
        assert answer.choices[0].message.content == REPLY
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == REPORT.cached_tokens
    assert replying.generations[0].sampling.seed == 1


def test_chat_stream(bpe_tokenizer: Tokenizer, replying: ScriptedService) -> None:
    with serving_front(replying, bpe_tokenizer) as url, client_of(url) as client:
        chunks = list(
            client.chat.completions.create(
                model=MODEL,
                messages=MESSAGES,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers={"x-kvferry-timings": "1"},
            )
        )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == REPLY
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["kvferry"]["transport"] == REPORT.transport


def test_the_stream_accumulator_of_the_library(bpe_tokenizer: Tokenizer, replying: ScriptedService) -> None:
    with (
        serving_front(replying, bpe_tokenizer) as url,
        client_of(url) as client,
        client.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream,
    ):
        final = stream.get_final_completion()
    assert final.choices[0].message.content == REPLY
    assert final.choices[0].finish_reason == "stop"


def test_completions(bpe_tokenizer: Tokenizer, replying: ScriptedService) -> None:
    with serving_front(replying, bpe_tokenizer) as url, client_of(url) as client:
        answer = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=40, stop=["渡"])
        assert [choice.text for choice in answer.choices] == ["the blocks arrive "] * 2
        chunks = list(client.completions.create(model=MODEL, prompt=[5, 6], max_tokens=40, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == REPLY


def test_models(bpe_tokenizer: Tokenizer, replying: ScriptedService) -> None:
    with serving_front(replying, bpe_tokenizer) as url, client_of(url) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).owned_by == "kvferry"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")


def test_errors_become_the_librarys_own(bpe_tokenizer: Tokenizer, replying: ScriptedService) -> None:
    with serving_front(replying, bpe_tokenizer) as url, client_of(url) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=MESSAGES, modalities=["audio"])
        assert (caught.value.param, caught.value.code) == ("modalities", "unsupported_field")
        assert caught.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=MESSAGES)
    for error, kind in (
        (Overloaded("full"), openai.RateLimitError),
        (NoWorkerAvailable("none"), openai.InternalServerError),
    ):
        with (
            serving_front(ScriptedService(failing(error)), bpe_tokenizer) as url,
            client_of(url) as client,
            pytest.raises(kind),
        ):
            client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)


def test_error_in_mid_stream(bpe_tokenizer: Tokenizer) -> None:
    service = ScriptedService(failing(WorkerLost("decode-0 is gone"), (5,), (6,)))
    with serving_front(service, bpe_tokenizer) as url, client_of(url) as client:
        stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="decode-0 is gone"):
            list(stream)


def test_closing_a_stream_cancels(bpe_tokenizer: Tokenizer) -> None:
    service = ScriptedService(hanging((5,), (6,)))
    with serving_front(service, bpe_tokenizer) as url, client_of(url) as client:
        stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        next(iter(stream))
        stream.close()
        service.wait("cancelled")


class City(BaseModel):
    """Where somebody is."""

    city: str


def test_structured_output(bpe_tokenizer: Tokenizer) -> None:
    service = service_saying(bpe_tokenizer, '{"city":"Rome"}')
    with serving_front(service, bpe_tokenizer) as url, client_of(url) as client:
        answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=City)
        assert answer.choices[0].message.parsed == City(city="Rome")
        with client.chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=City) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == City(city="Rome")
    grammar = service.generations[-1].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"
    assert '"required":["city"]' in grammar.text


async def test_a_strict_tool_streamed_without_blocking(bpe_tokenizer: Tokenizer) -> None:
    service = service_saying(bpe_tokenizer, "the ferry\n" + CALL)
    tool = openai.pydantic_function_tool(City, name="weather")
    with serving_front(service, bpe_tokenizer) as url:
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
            client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[tool]) as stream,
        ):
            events = [event async for event in stream]
            final = await stream.get_final_completion()
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(deltas) > 3
    assert "".join(event.arguments_delta for event in deltas) == ARGUMENTS
    assert deltas[-1].parsed_arguments == {"city": "Paris"}
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, event.parsed_arguments) for event in done] == [("weather", City(city="Paris"))]
    (call,) = final.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == City(city="Paris")
    assert service.generations[-1].sampling.grammar is not None


async def test_log_probabilities_and_choices_of_a_streamed_chat(bpe_tokenizer: Tokenizer) -> None:
    reply = bpe_tokenizer.encode(REPLY)
    with serving_front(telling(reply), bpe_tokenizer) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=MESSAGES,
                logprobs=True,
                top_logprobs=1,
                max_tokens=len(reply),
                n=2,
                stream=True,
                stream_options={"include_usage": True},
            )
            *chunks, last = [chunk async for chunk in stream]
    for index in range(2):
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert choices[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in choices) == REPLY
        scored = [token for choice in choices if choice.logprobs for token in choice.logprobs.content or ()]
        assert [token.logprob for token in scored] == [-0.25] * len(reply)
        assert b"".join(bytes(token.bytes or ()) for token in scored).decode() == REPLY
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 2 * len(reply)


async def test_many_at_once(bpe_tokenizer: Tokenizer) -> None:
    async def script(generation: Generation) -> AsyncIterator[Output]:
        for token_id in generation.token_ids:
            yield Output((token_id,))
            await asyncio.sleep(0)
        yield Output((IM_END,), "stop", REPORT)

    service = ScriptedService(script)
    with serving_front(service, bpe_tokenizer) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:

            async def ask(number: int) -> str:
                prompt = f"渡船 {number} 😀"
                if number % 2:
                    answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=40)
                    return answer.choices[0].text
                stream = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=40, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            texts = await asyncio.gather(*(ask(number) for number in range(24)))
    assert texts == [f"渡船 {number} 😀" for number in range(24)]
    assert service.counts() == {"opened": 24, "finished": 24, "cancelled": 0}


def test_scores_of_a_completion(bpe_tokenizer: Tokenizer) -> None:
    prompt, reply = bpe_tokenizer.encode(PROMPT), bpe_tokenizer.encode(REPLY)
    with serving_front(telling(reply), bpe_tokenizer) as url, client_of(url) as client:
        answer = client.completions.create(
            model=MODEL, prompt=PROMPT, echo=True, logprobs=1, best_of=2, n=1, max_tokens=len(reply)
        )
        (choice,) = answer.choices
        assert choice.text == PROMPT + REPLY
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [None, *(-float(row) for row in range(1, len(prompt)))] + [
            -0.25
        ] * len(reply)
        stream = client.completions.create(
            model=MODEL, prompt=PROMPT, echo=True, logprobs=1, max_tokens=len(reply), stream=True
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + REPLY
