"""A server that is measured: what it serves, which requests it understands, and one streamed answer.

Life cycle: a :class:`Server` is entered by :func:`reached`, asked, and closed at its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from cluster.bench.serve.answer import Stopwatch
from cluster.bench.serve.dialect import DIALECTS, Dialect
from cluster.bench.serve.events import EventReader
from cluster.bench.serve.prompt import PromptMaker
from cluster.bench.traces.request import TraceRequest
from protocol.errors import ConfigError, MalformedFrame
from router.client.lines import Lines
from router.client.results import ModelCard, error_of, models_of
from router.client.wire import (
    COMPLETIONS,
    MODELS,
    client_headers,
    client_trust,
    connection_error,
    request_headers,
    root_url,
)

PROBE_SECONDS = 60.0
SENT = "http11.send_request_body.complete"
"""As httpx names it."""
TEXT_SHARE = 0.9
"""Of a context that text may be thought to fill: its tokens are not known to the number."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, and as whom it is asked.

    Attributes:
        url: such as ``http://127.0.0.1:8000``, with or without ``/v1``.
        model: None for the first that it serves.
        api_key: where it wants one.
        ca_file: who vouches for its TLS.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    ca_file: str | None = None


class Server:
    """See :func:`reached`.

    Attributes:
        url, model: what is asked where.
        max_tokens: of prompt and answer together; None where it does not say.
        dialect: how it is asked.
    """

    def __init__(self, http: httpx.AsyncClient, card: ModelCard, dialect: Dialect) -> None:
        self.url = str(http.base_url).rstrip("/")
        self.model = card.id
        self.dialect = dialect
        limit = card.max_model_len
        self.max_tokens = limit if limit is None or dialect.token_ids else int(TEXT_SHARE * limit)
        self._http = http

    def body(self, prompts: PromptMaker, request: TraceRequest) -> bytes:
        """The JSON of a request."""
        return self.dialect.body(self.model, prompts, request)

    async def stream(self, body: bytes, watch: Stopwatch, clock: Callable[[], float], patience: float) -> str | None:
        """Ask, and take the times; what kind of failure it was, None where there was none.

        Args:
            body: of :meth:`body`.
            watch: takes the times of its events.
            clock: of these.
            patience: seconds that the whole may take.
        """
        try:
            async with asyncio.timeout(patience):
                return await self._streamed(body, watch, clock)
        except TimeoutError:
            return "timeout"

    async def _streamed(self, body: bytes, watch: Stopwatch, clock: Callable[[], float]) -> str | None:
        async def told(event: str, _: dict[str, object]) -> None:
            if event == SENT:
                watch.sent(clock())

        try:
            async with self._http.stream(
                "POST",
                COMPLETIONS,
                content=body,
                headers=request_headers(timings=False, request_id=None),
                extensions={"trace": told},
            ) as response:
                if response.status_code >= 400:
                    return f"http_{response.status_code}"
                events, lines = EventReader(), Lines()
                async for data in response.aiter_bytes():
                    for line in lines.push(data):
                        piece = events.push(line)
                        if piece is not None:
                            watch.push(piece, clock())
                        elif events.failed is not None:
                            return events.failed
                return None if events.done else "broken_stream"
        except httpx.TransportError as error:
            return connection_error(error, self.url).code
        except MalformedFrame as error:
            return error.code


@asynccontextmanager
async def reached(address: Address, prompts: PromptMaker) -> AsyncIterator[Server]:
    """A server that answers, and how it wants to be asked: by a request of a token in each way, until one is served.

    Raises:
        ConfigError: it does not serve that model, or understands none of our ways.
        ConnectionFailed, KVFerryError: it does not answer, or refuses.
    """
    async with httpx.AsyncClient(
        base_url=root_url(address.url),
        timeout=None,  # noqa: S113 -- each answer has its own
        trust_env=False,
        headers=client_headers(address.api_key),
        verify=client_trust(address.ca_file),
        # A bound would make requests wait here, and their time would be the server's.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    ) as http:
        cards = models_of((await _answered(http, "GET", MODELS)).content)
        card = next((card for card in cards if address.model in (None, card.id)), None)
        if card is None:
            known = ", ".join(card.id for card in cards) or "none"
            raise ConfigError(f"{address.url} does not serve {address.model!r}; it serves {known}", field="model")
        yield Server(http, card, await _dialect(http, card.id, prompts))


async def _dialect(http: httpx.AsyncClient, model: str, prompts: PromptMaker) -> Dialect:
    probe = TraceRequest(at=0.0, blocks=(0,), prompt_tokens=8, output_tokens=1, session=0)
    for dialect in DIALECTS:
        body = dialect.body(model, prompts, probe)
        response = await _answered(http, "POST", COMPLETIONS, body, refusals=(400, 422))
        if response.status_code < 400:
            return dialect
    raise error_of(response.status_code, response.content)


async def _answered(
    http: httpx.AsyncClient, method: str, path: str, body: bytes | None = None, refusals: tuple[int, ...] = ()
) -> httpx.Response:
    headers = {} if body is None else request_headers(timings=False, request_id=None)
    try:
        response = await http.request(method, path, content=body, headers=headers, timeout=PROBE_SECONDS)
    except httpx.HTTPError as error:
        raise connection_error(error, str(http.base_url)) from error
    if response.status_code >= 400 and response.status_code not in refusals:
        raise error_of(response.status_code, response.content)
    return response
