"""The asyncio client; it does what :mod:`router.client.synchronous` does, with ``await``.

Life cycle: an :class:`AsyncClient` is made, used, and closed (or used as an async context manager). An
:class:`AsyncStream` holds one connection until it ends or is closed; closing it early stops the generation on the
workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx

from router.client.explanation import Explanation, explanation_of
from router.client.overview import overview_of
from router.client.results import (
    Chunk,
    Completion,
    Health,
    ModelCard,
    completion_of,
    error_of,
    health_of,
    joined,
    models_of,
    text_of,
    tokenization_of,
)
from router.client.scores import Tokenization
from router.client.wire import (
    CHAT,
    CLUSTER,
    COMPLETIONS,
    DETOKENIZE,
    EXPLAIN,
    HEALTH,
    MODELS,
    RETRIED_STATUSES,
    TOKENIZE,
    EventReader,
    Messages,
    Prompt,
    RetryPolicy,
    chat_body,
    client_headers,
    client_trust,
    completion_body,
    connection_error,
    detokenize_body,
    first_model,
    may_retry,
    request_headers,
    root_url,
    stream_request,
    tokenize_body,
)
from router.overview import ClusterOverview


class AsyncStream:
    """An answer as it is written; iterate it for chunks.

    Attributes:
        request_id: the router's own id.
    """

    def __init__(self, response: httpx.Response, base_url: str) -> None:
        self.request_id = response.headers.get("x-request-id", "")
        self._response = response
        self._base_url = base_url
        self._chunks = self._read()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk.

        Raises:
            ConnectionFailed: the connection broke in mid-answer.
            KVFerryError: the router reports that the answer failed.
        """
        return await anext(self._chunks)

    async def read(self) -> Completion:
        """All that is still to come, as one completion."""
        return joined([chunk async for chunk in self], self.request_id)

    async def close(self) -> None:
        """Leave; the workers stop. A second call does nothing."""
        await self._chunks.aclose()
        await self._response.aclose()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _read(self) -> AsyncGenerator[Chunk, None]:
        events = EventReader()
        try:
            async for data in self._response.aiter_bytes():
                for chunk in events.push(data):
                    yield chunk
        except httpx.HTTPError as error:
            raise connection_error(error, self._base_url) from error
        finally:
            await self._response.aclose()
        events.finish()


class AsyncClient:
    """A connection to a router.

    Args:
        base_url: such as ``http://127.0.0.1:8000``, with or without ``/v1``.
        model: asked for where a call names none; by default the first that the router serves.
        timeout: seconds to wait for the next bytes of an answer, and to connect.
        retries: tries after the first, when the router cannot be reached or answers 429 or 503.
        backoff: seconds before the second try, doubled for each further one; 0 never waits.
        api_key: shown to the router, where it wants one.
        ca_file: certificates of the authorities that a router's TLS may be vouched for by, in PEM; by default the
            well-known ones.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        timeout: float = 600.0,
        retries: int = 2,
        backoff: float = 0.25,
        api_key: str | None = None,
        ca_file: str | None = None,
    ) -> None:
        self.base_url = root_url(base_url)
        self._model = model
        self._policy = RetryPolicy(retries, backoff)
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            timeout=timeout,
            trust_env=False,
            headers=client_headers(api_key),
            verify=client_trust(ca_file),
        )

    async def complete(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timings: bool = False,
        request_id: str | None = None,
        echo: bool | None = None,
        best_of: int | None = None,
        prompt_logprobs: int | None = None,
        **params: Any,
    ) -> Completion:
        """Continue a prompt: text, token ids, or a list of either.

        Args:
            prompt: what to continue.
            model: by default the client's.
            timings: whether the result shall carry timings.
            request_id: the caller's own id; it comes back in a header.
            echo: whether the text shall begin with the prompt, and its log-probabilities with those of the prompt.
            best_of: how many continuations are made, of which the likeliest per token come back.
            prompt_logprobs: how many alternatives the result shall name beside each prompt token.
            params: further fields of the request, such as ``max_tokens`` and ``temperature``.

        Raises:
            InvalidRequest: the router refuses the request; names the field.
            ConnectionFailed: the router cannot be reached.
            KVFerryError: anything else that the router reports.
        """
        params |= {"echo": echo, "best_of": best_of, "prompt_logprobs": prompt_logprobs}
        body = completion_body(prompt, model or await self._default_model(), params)
        return await self._whole(COMPLETIONS, body, request_headers(timings=timings, request_id=request_id))

    async def chat(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        timings: bool = False,
        request_id: str | None = None,
        prompt_logprobs: int | None = None,
        **params: Any,
    ) -> Completion:
        """The assistant's answer to a chat; arguments and errors as :meth:`complete`."""
        params["prompt_logprobs"] = prompt_logprobs
        body = chat_body(messages, model or await self._default_model(), params)
        return await self._whole(CHAT, body, request_headers(timings=timings, request_id=request_id))

    async def stream(
        self,
        prompt: Prompt | Messages,
        *,
        model: str | None = None,
        timings: bool = False,
        request_id: str | None = None,
        **params: Any,
    ) -> AsyncStream:
        """The answer to a prompt, or to a chat, as it is written; arguments and errors as :meth:`complete`."""
        path, body = stream_request(prompt, model or await self._default_model(), params)
        response = await self._send("POST", path, body, request_headers(timings=timings, request_id=request_id))
        return AsyncStream(response, self.base_url)

    async def tokenize(
        self,
        text: str | Messages,
        *,
        model: str | None = None,
        add_special_tokens: bool | None = None,
        add_generation_prompt: bool | None = None,
        return_token_strs: bool | None = None,
    ) -> Tokenization:
        """The token ids of a prompt, or of a chat.

        Args:
            text: a prompt, or a chat's messages.
            model: the router refuses another one than it serves.
            add_special_tokens: by default true for a prompt, and false for a chat, whose template has them.
            add_generation_prompt: whether a chat shall be ready for the assistant's turn; by default it is.
            return_token_strs: whether the vocabulary's writing of each token shall be named.

        Raises:
            InvalidRequest: the router refuses the request; names the field.
            ConnectionFailed: the router cannot be reached.
        """
        fields = {
            "model": model,
            "add_special_tokens": add_special_tokens,
            "add_generation_prompt": add_generation_prompt,
            "return_token_strs": return_token_strs,
        }
        return tokenization_of(await self._posted(TOKENIZE, tokenize_body(text, fields)))

    async def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        """The text of token ids; errors as :meth:`tokenize`."""
        return text_of(await self._posted(DETOKENIZE, detokenize_body(token_ids, model)))

    async def models(self) -> tuple[ModelCard, ...]:
        """The served models."""
        return models_of(await self._content(await self._send("GET", MODELS, None, {})))

    async def explain(self, request_id: str) -> Explanation:
        """Why a request went where it went; ``request_id`` is that of its answer.

        Raises:
            UnknownRequest: the router does not know it, or not any more.
        """
        path = EXPLAIN + quote(request_id, safe="")
        return explanation_of(await self._content(await self._send("GET", path, None, {})))

    async def cluster(self) -> ClusterOverview:
        """The router's workers, and what they do."""
        return overview_of(await self._content(await self._send("GET", CLUSTER, None, {})))

    async def health(self) -> Health:
        """The router's health; being not ready is an answer, not an error."""
        try:
            response = await self._http.get(HEALTH)
        except httpx.HTTPError as error:
            raise connection_error(error, self.base_url) from error
        return health_of(response.content)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _default_model(self) -> str:
        if self._model is None:
            self._model = first_model(card.id for card in await self.models())
        return self._model

    async def _whole(self, path: str, body: bytes, headers: Mapping[str, str]) -> Completion:
        response = await self._send("POST", path, body, headers)
        return completion_of(await self._content(response), response.headers.get("x-request-id", ""))

    async def _posted(self, path: str, body: bytes) -> bytes:
        headers = request_headers(timings=False, request_id=None)
        return await self._content(await self._send("POST", path, body, headers))

    async def _content(self, response: httpx.Response) -> bytes:
        try:
            return await response.aread()
        except httpx.HTTPError as error:
            raise connection_error(error, self.base_url) from error
        finally:
            await response.aclose()

    async def _send(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> httpx.Response:
        """A response whose head has come and says success; its body is still to be read."""
        tried = 0
        while True:
            tried += 1
            request = self._http.build_request(method, path, content=body, headers=headers)
            try:
                response = await self._http.send(request, stream=True)
            except httpx.HTTPError as error:
                if not may_retry(error) or tried > self._policy.retries:
                    raise connection_error(error, self.base_url) from error
                await asyncio.sleep(self._policy.pause(tried))
                continue
            if response.status_code < 400:
                return response
            content = await self._content(response)
            if response.status_code not in RETRIED_STATUSES or tried > self._policy.retries:
                raise error_of(response.status_code, content)
            await asyncio.sleep(self._policy.pause(tried, response.headers.get("retry-after")))
