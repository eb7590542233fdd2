"""The client that ships with the project, against the front."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from front_stage import (
    IM_END,
    MODEL,
    REPORT,
    ScriptedService,
    failing,
    hanging,
    one_by_one,
    saying,
    serving,
    serving_front,
)

from protocol.errors import (
    ConfigError,
    ConnectionFailed,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    KVFerryError,
    MalformedFrame,
    NoWorkerAvailable,
    Overloaded,
    UnknownModel,
    UnsupportedField,
    WorkerLost,
)
from router.client import AsyncClient, Client, Completion
from router.front.generation import Generation, Output
from router.tokenizer import Tokenizer

REPLY = "the blocks arrive 渡船 😀"
MESSAGES = [{"role": "user", "content": "the ferry"}]


@pytest.fixture
def replying(bpe_tokenizer: Tokenizer) -> ScriptedService:
    return ScriptedService(one_by_one((*bpe_tokenizer.encode(REPLY), IM_END), "stop"))


class FlakyService(ScriptedService):
    """Refuses some requests before it plays its script."""

    def __init__(self, refusals: list[KVFerryError], token_ids: tuple[int, ...]) -> None:
        async def script(_: Generation) -> AsyncIterator[Output]:
            if refusals:
                raise refusals.pop()
            yield Output(token_ids, "length", REPORT)

        super().__init__(script)


def test_answers(bpe_tokenizer: Tokenizer, replying: ScriptedService) -> None:
    with serving_front(replying, bpe_tokenizer) as url, Client(url) as client:
        chat = client.chat(MESSAGES, max_tokens=40, timings=True)
        assert (chat.text, chat.finish_reason, chat.timings) == (REPLY, "stop", REPORT)
        assert chat.usage is not None
        assert chat.usage.cached_tokens == REPORT.cached_tokens
        assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
        assert len(chat.request_id) == 32
        text = client.complete("the ferry", max_tokens=40, temperature=None)
        assert (text.text, text.timings, text.choices) == (REPLY, None, (REPLY,))
        both = client.complete([[5], [6, 7]], max_tokens=40, timings=True)
        assert both.choices == (REPLY, REPLY)
        assert both.timings == REPORT
        with pytest.raises(dataclasses.FrozenInstanceError):
            text.text = "other"  # type: ignore[misc]
        assert [card.id for card in client.models()] == [MODEL]
        assert client.models()[0].max_model_len == 128
        assert client.health().ready


def test_streams(bpe_tokenizer: Tokenizer, replying: ScriptedService) -> None:
    with serving_front(replying, bpe_tokenizer) as url, Client(url, model=MODEL) as client:
        for prompt in ("the ferry", MESSAGES, [5, 6]):
            with client.stream(prompt, max_tokens=40, timings=True) as stream:
                chunks = list(stream)
            assert "".join(chunk.text for chunk in chunks) == REPLY
            assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
            assert chunks[-1].timings == REPORT
            whole = client.stream(prompt, max_tokens=40, timings=True).read()
            assert whole.text == REPLY
            assert whole.usage == chunks[-1].usage
            assert whole.timings == REPORT


async def test_async_answers_and_streams(bpe_tokenizer: Tokenizer, replying: ScriptedService) -> None:
    with serving_front(replying, bpe_tokenizer) as url:
        async with AsyncClient(url) as client:
            assert (await client.chat(MESSAGES, max_tokens=40)).text == REPLY
            assert (await client.complete("x", max_tokens=40, timings=True)).timings == REPORT
            async with await client.stream(MESSAGES, max_tokens=40) as stream:
                assert "".join([chunk.text async for chunk in stream]) == REPLY
            assert (await (await client.stream("x", max_tokens=40)).read()).text == REPLY
            assert [card.id for card in await client.models()] == [MODEL]
            assert (await client.health()).ready
            several = await asyncio.gather(*(client.complete("x", max_tokens=40) for _ in range(8)))
            assert {answer.text for answer in several} == {REPLY}


async def test_a_streamed_text_may_have_what_some_take_for_the_end_of_a_line(bpe_tokenizer: Tokenizer) -> None:
    reply = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\r\nh"
    service = ScriptedService(one_by_one((*bpe_tokenizer.encode(reply), IM_END), "stop"))
    with serving_front(service, bpe_tokenizer) as url:
        with Client(url) as client, client.stream("x", max_tokens=60) as stream:
            assert "".join(chunk.text for chunk in stream) == reply
        async with AsyncClient(url) as async_client:
            assert (await (await async_client.stream("x", max_tokens=60)).read()).text == reply


def test_errors_are_rebuilt(bpe_tokenizer: Tokenizer, replying: ScriptedService) -> None:
    cases: list[tuple[dict[str, Any], type[KVFerryError], str]] = [
        ({"max_tokens": -1}, InvalidRequest, "max_tokens"),
        ({"suffix": "and so on"}, UnsupportedField, "suffix"),
        ({"model": "other"}, UnknownModel, "model"),
        ({"max_tokens": 10_000}, ContextLengthExceeded, "max_tokens"),
    ]
    with serving_front(replying, bpe_tokenizer) as url, Client(url) as client:
        for params, kind, field in cases:
            for call in (client.complete, client.stream):
                with pytest.raises(kind) as caught:
                    call("x", **params)
                assert type(caught.value) is kind
                assert caught.value.field == field
        with Client(url + "/elsewhere", model=MODEL) as lost, pytest.raises(InvalidRequest, match="there is nothing"):
            lost.complete("x")


async def test_async_errors_are_rebuilt(bpe_tokenizer: Tokenizer, replying: ScriptedService) -> None:
    with serving_front(replying, bpe_tokenizer) as url:
        async with AsyncClient(url) as client:
            with pytest.raises(InvalidRequest) as caught:
                await client.chat(MESSAGES, top_p=7)
            assert caught.value.field == "top_p"


def test_error_in_mid_stream(bpe_tokenizer: Tokenizer) -> None:
    service = ScriptedService(failing(WorkerLost("decode-0 is gone"), (5,), (6,)))
    with serving_front(service, bpe_tokenizer) as url, Client(url) as client:
        stream = client.stream(MESSAGES)
        with pytest.raises(WorkerLost, match="decode-0 is gone"):
            list(stream)
        assert service.counts()["opened"] == 1


@pytest.mark.parametrize("error", [Overloaded("full"), NoWorkerAvailable("none")])
def test_refusals_are_tried_again(bpe_tokenizer: Tokenizer, error: KVFerryError) -> None:
    for stream in (False, True):
        service = FlakyService([error, error], bpe_tokenizer.encode(REPLY))
        with serving_front(service, bpe_tokenizer) as url, Client(url, backoff=0) as client:
            answer: Completion = client.stream("x").read() if stream else client.complete("x")
            assert answer.text == REPLY
            assert service.counts()["opened"] == 3


async def test_async_refusals_are_tried_again(bpe_tokenizer: Tokenizer) -> None:
    service = FlakyService([Overloaded("full")] * 2, bpe_tokenizer.encode(REPLY))
    with serving_front(service, bpe_tokenizer) as url:
        async with AsyncClient(url, backoff=0) as client:
            assert (await client.complete("x")).text == REPLY
    assert service.counts()["opened"] == 3


def test_retries_are_counted(bpe_tokenizer: Tokenizer) -> None:
    service = ScriptedService(failing(Overloaded("full")))
    with serving_front(service, bpe_tokenizer) as url, Client(url, model=MODEL, retries=1, backoff=0) as client:
        with pytest.raises(Overloaded, match="full"):
            client.complete("x")
        assert service.counts()["opened"] == 2


def test_other_errors_are_not_tried_again(bpe_tokenizer: Tokenizer) -> None:
    service = ScriptedService(failing(DeadlineExceeded("late")))
    with serving_front(service, bpe_tokenizer) as url, Client(url, backoff=0) as client:
        with pytest.raises(DeadlineExceeded):
            client.complete("x")
        assert service.counts()["opened"] == 1


def unused_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_router_that_is_not_there() -> None:
    url = unused_url()
    with Client(url, backoff=0) as client:
        for call in (client.models, client.health, lambda: client.complete("x"), lambda: client.stream("x")):
            with pytest.raises(ConnectionFailed) as caught:
                call()
            assert caught.value.__cause__ is not None
            assert url in str(caught.value)
    async with AsyncClient(url, backoff=0) as async_client:
        with pytest.raises(ConnectionFailed):
            await async_client.chat(MESSAGES)
        with pytest.raises(ConnectionFailed):
            await async_client.health()


class RawAnswer:
    """An ASGI application that answers everything with the same bytes, whole or cut off."""

    def __init__(self, status: int, body: bytes, *, cut: bool = False) -> None:
        self._status = status
        self._body = body
        self._cut = cut

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": self._status, "headers": headers})
        await send({"type": "http.response.body", "body": self._body, "more_body": self._cut})


CHUNK = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'


@pytest.mark.parametrize("cut", [False, True])
async def test_stream_that_ends_too_soon(cut: bool) -> None:
    with serving(RawAnswer(200, CHUNK, cut=cut)) as url:
        with Client(url, model=MODEL) as client:
            stream = client.stream("x")
            assert next(stream).text == "a"
            with pytest.raises(ConnectionFailed):
                next(stream)
        async with AsyncClient(url, model=MODEL) as async_client:
            async_stream = await async_client.stream("x")
            assert (await anext(async_stream)).text == "a"
            with pytest.raises(ConnectionFailed):
                await anext(async_stream)


def test_answer_that_ends_too_soon() -> None:
    with (
        serving(RawAnswer(200, b'{"choices": [', cut=True)) as url,
        Client(url, model=MODEL) as client,
        pytest.raises(ConnectionFailed),
    ):
        client.complete("x")


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"choices": 5}', b"\xff"])
def test_answers_that_are_not_ours(body: bytes) -> None:
    with serving(RawAnswer(200, body)) as url, Client(url, model=MODEL) as client:
        with pytest.raises(MalformedFrame):
            client.complete("x")
        with pytest.raises(MalformedFrame):
            client.models()
    with serving(RawAnswer(200, b"data: " + body + b"\n\n")) as url, Client(url, model=MODEL) as client:
        if body != b"{}":
            with pytest.raises(MalformedFrame):
                list(client.stream("x"))


@pytest.mark.parametrize(
    ("status", "kind"),
    [(502, KVFerryError), (503, NoWorkerAvailable), (429, Overloaded), (504, DeadlineExceeded), (403, InvalidRequest)],
)
def test_errors_of_something_between(status: int, kind: type[KVFerryError]) -> None:
    with (
        serving(RawAnswer(status, b"<html>bad gateway</html>")) as url,
        Client(url, model=MODEL, backoff=0) as client,
        pytest.raises(kind, match=f"answered {status}.*bad gateway"),
    ):
        client.complete("x")


def test_read_timeout_is_a_deadline(bpe_tokenizer: Tokenizer) -> None:
    service = ScriptedService(hanging())
    with serving_front(service, bpe_tokenizer) as url, Client(url, model=MODEL, timeout=0.2) as client:
        with pytest.raises(DeadlineExceeded):
            client.complete("x")
        service.wait("cancelled")
        assert service.counts()["opened"] == 1


async def test_closing_a_stream_cancels(bpe_tokenizer: Tokenizer) -> None:
    service = ScriptedService(hanging((5,), (6,)))
    with serving_front(service, bpe_tokenizer) as url:
        with Client(url) as client, client.stream("x") as stream:
            next(stream)
            stream.close()
            stream.close()
            service.wait("cancelled", 1)
            with pytest.raises(StopIteration):
                next(stream)
        async with AsyncClient(url) as async_client:
            async with await async_client.stream("x") as async_stream:
                await anext(async_stream)
            service.wait("cancelled", 2)


def test_a_stream_closed_before_its_first_chunk_cancels(bpe_tokenizer: Tokenizer) -> None:
    service = ScriptedService(hanging((5,)))
    with serving_front(service, bpe_tokenizer) as url, Client(url) as client:
        client.stream("x").close()
        service.wait("cancelled")


def test_own_request_id(bpe_tokenizer: Tokenizer) -> None:
    service = ScriptedService(saying((5,)))
    with serving_front(service, bpe_tokenizer) as url, Client(url) as client:
        first = client.complete("x", request_id="mine")
        second = client.complete("x", request_id="mine")
    assert first.request_id != second.request_id


@pytest.mark.parametrize(("field", "value"), [("retries", -1), ("backoff", -0.5)])
def test_bad_settings(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=str(value)) as caught:
        Client("http://127.0.0.1:1", **{field: value})
    assert caught.value.field == field


def test_the_url_of_the_openai_api_is_as_good(bpe_tokenizer: Tokenizer, replying: ScriptedService) -> None:
    with serving_front(replying, bpe_tokenizer) as url:
        for base in (url, f"{url}/", f"{url}/v1", f"{url}/v1/"):
            with Client(base) as client:
                assert client.complete("x", max_tokens=40).text == REPLY


def test_what_is_no_unicode_is_refused_before_it_is_sent() -> None:
    with Client("http://127.0.0.1:9", model="m") as client, pytest.raises(InvalidRequest, match="not valid Unicode"):
        client.complete("bad \udcff bytes")
