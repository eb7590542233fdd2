"""What the front does when a client goes away."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from front_stage import (
    CHAT,
    PATIENCE,
    TEXT,
    ScriptedService,
    hanging,
    serving_front,
)

from router.front.app import Front
from router.front.config import FrontConfig
from router.front.generation import Generation, Output
from router.tokenizer import Tokenizer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("first", [(), ((5,), (6,))])
def test_client_that_leaves_cancels(
    bpe_tokenizer: Tokenizer, stream: bool, path: str, first: tuple[tuple[int, ...], ...]
) -> None:
    service = ScriptedService(hanging(*first))
    body = json.dumps({**(TEXT if path == "/v1/completions" else CHAT), "stream": stream}).encode()
    with serving_front(service, bpe_tokenizer) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), PATIENCE) as client:
            head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            service.wait("opened")
            if stream and first:
                received = b""
                while b"data: " not in received:
                    received += client.recv(4096)
            assert service.counts()["cancelled"] == 0
        service.wait("cancelled")


def test_client_that_leaves_cancels_a_whole_batch(bpe_tokenizer: Tokenizer) -> None:
    service = ScriptedService(hanging((5,)))
    body = json.dumps({**TEXT, "prompt": ["a", "b", "c"], "stream": True}).encode()
    with serving_front(service, bpe_tokenizer) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), PATIENCE) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            service.wait("opened", 3)
        service.wait("cancelled", 3)


async def test_client_that_leaves_in_mid_body_is_forgotten(bpe_tokenizer: Tokenizer) -> None:
    service = ScriptedService(hanging())
    messages = [{"type": "http.request", "body": b'{"mod', "more_body": True}, {"type": "http.disconnect"}]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    await Front(service, bpe_tokenizer)(scope, receive, send)
    assert sent == []
    assert service.generations == []


@pytest.mark.parametrize("fault", ["raises", "blocks"])
async def test_client_that_takes_no_more_cancels(bpe_tokenizer: Tokenizer, fault: str) -> None:
    service = ScriptedService(hanging((5,), (6,), (7,)))
    requests = [{"type": "http.request", "body": json.dumps({**TEXT, "stream": True}).encode(), "more_body": False}]

    async def receive() -> Any:
        if requests:
            return requests.pop()
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            if fault == "raises":
                raise ConnectionResetError
            await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    front = Front(service, bpe_tokenizer, FrontConfig(send_timeout=0.05))
    await asyncio.wait_for(front(scope, receive, send), PATIENCE)
    assert service.counts() == {"opened": 1, "finished": 0, "cancelled": 1}
    assert len(asyncio.all_tasks()) == 1


async def test_a_cancelled_request_leaves_nothing(bpe_tokenizer: Tokenizer) -> None:
    opened = asyncio.Barrier(3)

    async def script(_: Generation) -> AsyncIterator[Output]:
        await opened.wait()
        await asyncio.Event().wait()
        yield Output((5,))

    service = ScriptedService(script)
    requests = [{"type": "http.request", "body": json.dumps({**TEXT, "prompt": ["a", "b"]}).encode()}]

    async def receive() -> Any:
        return requests.pop() if requests else await asyncio.Event().wait()

    async def send(_: Any) -> None:
        raise AssertionError("nothing is sent")

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    task = asyncio.create_task(Front(service, bpe_tokenizer)(scope, receive, send))
    await opened.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert service.counts()["cancelled"] == 2
    assert len(asyncio.all_tasks()) == 1
