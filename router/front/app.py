"""The ASGI application: OpenAI's API in front of a generation service.

Life cycle: made, called for each request, :meth:`Front.close` once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from typing import TYPE_CHECKING, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from protocol.errors import KVFerryError, ProtocolError, RequestCancelled, UnknownModel, UnknownRequest
from router.front import standing
from router.front.answers import Answer
from router.front.choices import Choices
from router.front.config import FrontConfig
from router.front.errors import error_body, error_object, retry_after, status_of
from router.front.exchange import Exchange, Header, Receive, Scope, Send
from router.front.explanation import explained
from router.front.formats import AnswerFormat, ChatShape, CompletionShape, Shape, event
from router.front.generation import GenerationService
from router.front.inspector import Inspector
from router.front.keys import Gatekeeper
from router.front.openapi import document
from router.front.parsing import parse_chat, parse_completion, shown
from router.front.plan import Plan, Planner
from router.front.routes import Found, RouteTable, WrongMethod
from router.front.schema import GenerationRequest
from router.front.status_page import HTML, status_page
from router.front.token_desk import TokenDesk
from router.front.watching import Watching
from router.sampling_defaults import SamplingDefaults
from router.tokenizer import Tokenizer

if TYPE_CHECKING:
    from router.request_trace import RequestTrace, RequestTraces

log = logging.getLogger(__name__)

Handler = Callable[[Exchange, str], Awaitable[None]]
R = TypeVar("R", bound=GenerationRequest)

LONG_BODY_BYTES = 16 << 10
"""From here on a request is parsed and tokenised in a thread, so that running streams do not wait for it."""
OWNER = "kvferry"
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ping"})
"""No key is needed: the page is the same for every cluster, and probes are told the state and nothing else."""


class Front:
    """The HTTP front of a router.

    Args:
        service: continues prompts.
        tokenizer: of the checkpoint that the service serves.
        config: bounds on what clients may send.
        gatekeeper: knows who may ask; by default everybody.
        defaults: of sampling fields that requests leave out; neutral ones by default.
        traces: of the requests; None makes none.
    """

    def __init__(
        self,
        service: GenerationService,
        tokenizer: Tokenizer,
        config: FrontConfig | None = None,
        gatekeeper: Gatekeeper | None = None,
        defaults: SamplingDefaults | None = None,
        traces: RequestTraces | None = None,
    ) -> None:
        self._service = service
        self._gatekeeper = gatekeeper or Gatekeeper()
        self._tokenizer = tokenizer
        self._config = config or FrontConfig()
        self._defaults = defaults or SamplingDefaults()
        self._traces = traces
        self._created = int(time.time())
        self._version = version("kvferry")
        self._document = document(self._version)
        self._inspector = Inspector(tokenizer.file, tokenizer.vocab_size)
        self._desk = TokenDesk(tokenizer, self._check_model, self._max_model_len)
        self._watching = Watching(
            lambda: msgspec.json.encode(service.cluster()),
            most=self._config.max_watchers,
            most_each=self._config.max_watchers_each,
            interval=self._config.watch_interval,
            patience=self._config.watch_patience,
        )
        self._status_page = status_page()
        self._routes: RouteTable[Handler] = RouteTable(
            {
                "/": {"GET": self._page},
                "/v1/chat/completions": {"POST": self._chat},
                "/v1/completions": {"POST": self._completion},
                "/tokenize": {"POST": self._tokenize},
                "/detokenize": {"POST": self._detokenize},
                "/v1/models": {"GET": self._models},
                "/v1/models/": {"GET": self._model},
                "/health": {"GET": self._health},
                "/ready": {"GET": self._health},
                "/ping": {"GET": self._health},
                "/version": {"GET": self._tell_version},
                "/openapi.json": {"GET": self._openapi},
                "/metrics": {"GET": self._metrics},
                "/cluster": {"GET": self._cluster},
                "/cluster/events": {"GET": self._cluster_events},
                "/explain/": {"GET": self._explain},
            }
        )

    def end_watching(self) -> None:
        """Let nobody watch the cluster any more: such answers have no end of their own."""
        self._watching.close()

    async def close(self) -> None:
        """End what it has started; nothing is answered any more."""
        self.end_watching()
        await self._inspector.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request (ASGI 3)."""
        if scope["type"] != "http":
            raise ProtocolError(f"the front speaks HTTP alone, got {scope['type']!r}")
        exchange = Exchange(scope, receive, send, send_timeout=self._config.send_timeout)
        try:
            await self._answer(exchange)
        except RequestCancelled:
            log.debug("request %s: the client went away", exchange.request_id)

    async def _answer(self, exchange: Exchange) -> None:
        found = self._routes.find(exchange.method, exchange.path)
        if not isinstance(found, Found):
            await _no_route(exchange, found)
            return
        try:
            if exchange.path not in OPEN_PATHS:
                exchange.holder = self._gatekeeper.check(exchange.header(b"authorization"))
            await found.handler(exchange, found.rest)
        except RequestCancelled:
            raise
        except KVFerryError as error:
            await _refuse(exchange, error)
        except Exception:
            log.exception("request %s failed", exchange.request_id)
            await _refuse(exchange, KVFerryError("internal error"))

    async def _chat(self, exchange: Exchange, _: str) -> None:
        await self._generate(exchange, ChatShape(), parse_chat, lambda planner, request: planner.chat(request))

    async def _completion(self, exchange: Exchange, _: str) -> None:
        await self._generate(
            exchange, CompletionShape(), parse_completion, lambda planner, request: planner.completion(request)
        )

    async def _generate(
        self, exchange: Exchange, shape: Shape, parse: Callable[[bytes], R], plan: Callable[[Planner, R], Plan]
    ) -> None:
        traced = nullcontext() if self._traces is None else self._traces.of(exchange)
        with traced as trace, self._entered(exchange):
            await self._generate_for(exchange, shape, parse, plan, trace)

    @contextmanager
    def _entered(self, exchange: Exchange) -> Iterator[None]:
        """Around what a key may do so often, and so much of at a time."""
        self._gatekeeper.enter(exchange.holder, time.monotonic())
        try:
            yield
        finally:
            self._gatekeeper.leave(exchange.holder)

    async def _tokenize(self, exchange: Exchange, _: str) -> None:
        await self._at_desk(exchange, self._desk.tokenize)

    async def _detokenize(self, exchange: Exchange, _: str) -> None:
        await self._at_desk(exchange, self._desk.detokenize)

    async def _at_desk(self, exchange: Exchange, answer: Callable[[bytes], bytes]) -> None:
        with self._entered(exchange):
            body = await exchange.read_json(self._config.max_body_bytes)
            told = answer(body) if len(body) < LONG_BODY_BYTES else await asyncio.to_thread(answer, body)
            await exchange.respond(200, told)

    async def _generate_for(
        self,
        exchange: Exchange,
        shape: Shape,
        parse: Callable[[bytes], R],
        plan: Callable[[Planner, R], Plan],
        trace: RequestTrace | None,
    ) -> None:
        body = await exchange.read_json(self._config.max_body_bytes)
        planner = Planner(self._tokenizer, self._config, self._max_model_len(), self._defaults)

        def prepare() -> Plan:
            request = parse(body)
            self._check_model(request.model)
            if trace is not None:
                trace.asked(request)
            header = exchange.header(standing.HEADER)
            found = standing.standing_of(self._config.slo, request, header, exchange.holder)
            return plan(planner, request).of(exchange.request_id, found)

        async def work() -> None:
            begun = time.monotonic()
            ready = prepare() if len(body) < LONG_BODY_BYTES else await asyncio.to_thread(prepare)
            if trace is not None:
                ready = trace.planned(ready, begun)
            for form in ready.forms:
                await self._inspector.check(form.grammar, form.field)
            if exchange.header(b"x-kvferry-explain") == b"1":
                exchange.notes = lambda: explained(self._service.explain(exchange.request_id))
            shown_as = AnswerFormat(
                shape,
                exchange.request_id,
                self._service.model,
                include_usage=ready.include_usage,
                timings=exchange.header(b"x-kvferry-timings") == b"1",
                logprobs=ready.logprobs is not None,
            )
            choices = Choices(self._service, self._tokenizer, ready)
            await Answer(exchange, shown_as, choices, ready, self._tokenizer).send()

        await exchange.until_gone(work())

    def _max_model_len(self) -> int | None:
        return self._service.max_model_len or self._tokenizer.max_model_len

    def _check_model(self, name: str) -> None:
        if name != self._service.model:
            raise UnknownModel(f"the model {shown(name)} does not exist", field="model")

    async def _models(self, exchange: Exchange, _: str) -> None:
        await exchange.respond(200, msgspec.json.encode({"object": "list", "data": [self._model_card()]}))

    async def _model(self, exchange: Exchange, name: str) -> None:
        self._check_model(name)
        await exchange.respond(200, msgspec.json.encode(self._model_card()))

    def _model_card(self) -> dict[str, object]:
        return {
            "id": self._service.model,
            "object": "model",
            "created": self._created,
            "owned_by": OWNER,
            "max_model_len": self._max_model_len(),
        }

    async def _health(self, exchange: Exchange, _: str) -> None:
        health = self._service.health()
        await exchange.respond(200 if health.ready else 503, msgspec.json.encode(health))

    async def _tell_version(self, exchange: Exchange, _: str) -> None:
        await exchange.respond(200, msgspec.json.encode({"version": self._version}))

    async def _openapi(self, exchange: Exchange, _: str) -> None:
        await exchange.respond(200, self._document)

    async def _metrics(self, exchange: Exchange, _: str) -> None:
        # With hundreds of workers it takes most of a second, and streams do not wait for it.
        text = await asyncio.to_thread(self._service.metrics)
        await exchange.respond(200, text, content_type=CONTENT_TYPE_LATEST.encode())

    async def _cluster(self, exchange: Exchange, _: str) -> None:
        await exchange.respond(200, msgspec.json.encode(self._service.cluster()))

    async def _cluster_events(self, exchange: Exchange, _: str) -> None:
        await exchange.read_body(self._config.max_body_bytes)
        await self._watching.show(exchange)

    async def _page(self, exchange: Exchange, _: str) -> None:
        page = self._status_page
        await exchange.respond(200, page.body, content_type=HTML, headers=page.headers)

    async def _explain(self, exchange: Exchange, name: str) -> None:
        decisions = self._service.explain(name)
        if not decisions:
            raise UnknownRequest(f"nothing is known of a request {shown(name)}")
        await exchange.respond(200, msgspec.json.encode({"request": name, "decisions": decisions}))


async def _no_route(exchange: Exchange, found: WrongMethod | None) -> None:
    headers: tuple[Header, ...] = ()
    if found is None:
        status, code, message = 404, "not_found", f"there is nothing at {exchange.path[:200]}"
    else:
        status, code, message = 405, "method_not_allowed", f"{exchange.path[:200]} does not answer {exchange.method}"
        headers = ((b"allow", ", ".join(found.allowed).encode()),)
    await exchange.respond(status, msgspec.json.encode(error_object(message, status, code)), headers=headers)


async def _refuse(exchange: Exchange, error: KVFerryError) -> None:
    """Answer an error: with its status, or as an event where the answer has begun."""
    if exchange.started:
        await exchange.end(event(error_body(error)))
        return
    status = status_of(error)
    headers: list[Header] = []
    pause = retry_after(error)
    if pause is not None:
        headers.append((b"retry-after", str(pause).encode()))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
        # Its body was not read.
        headers.append((b"connection", b"close"))
    if status == 413:
        # The rest of the body may still be on its way; nothing else may be read from this connection.
        headers.append((b"connection", b"close"))
    await exchange.respond(status, error_body(error), headers=headers)
