"""One router, whole: the service, the tokenizer and the HTTP front under uvicorn, inside the caller's event loop.

Life cycle: made without I/O, :meth:`RouterServer.start` once, :meth:`RouterServer.stop` once (a second call does
nothing). A failed start leaves nothing behind. Signals are the caller's business.

One router takes another's place without a client that notices: the new one's ``inherit`` brings it the socket that the
old one listens at (:meth:`RouterServer.share`), both take connections from its one queue, and then the old one leaves
(:meth:`RouterServer.leave`) and stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING

import uvicorn

from protocol.errors import StartFailed
from protocol.tracing.config import tracing
from router.config import RouterConfig
from router.front.app import Front
from router.front.config import FrontConfig
from router.front.keys import Gatekeeper, check_classes, read_keys
from router.http_protocol import BoundedHttpProtocol
from router.sampling_defaults import SamplingDefaults
from router.service import Service
from router.span_metrics import OwnSpans
from router.tls import server_context
from router.tokenizer import Tokenizer

if TYPE_CHECKING:
    from protocol.tracing.tracer import Tracer
    from router.request_trace import RequestTraces

_log = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE = 30
"""Seconds an idle connection stays open."""
START_POLL = 0.01
STOP_MARGIN = 5.0
"""Seconds that uvicorn has beyond the grace to end what it cancelled."""
LEAVE_POLL = 0.05
CLOSE = (b"connection", b"close")

Inherit = Callable[[Service], Awaitable[socket.socket | None]]
"""Called once the hub is bound; gives a listening socket that another router has, or None to bind one."""


class _SignalFreeServer(uvicorn.Server):
    """uvicorn takes over the process's signal handlers by default; here they belong to whoever runs the loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class RouterServer:
    """A router that answers HTTP at :attr:`url` and workers at :attr:`hub_endpoint`.

    Fastest when the caller's loop is uvloop's.

    Args:
        config: of this router.
        inherit: see there; None binds at once.
    """

    def __init__(self, config: RouterConfig, inherit: Inherit | None = None) -> None:
        self._config, self._inherit = config, inherit
        self._listener: socket.socket | None = None
        self._service = Service(config, self._own_spans)
        self._tracing = contextlib.AsyncExitStack()
        self._tracer: Tracer | None = None
        self._front: Front | None = None
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._port = config.port
        self._stopping = False
        self._stopped = asyncio.Event()

    @property
    def service(self) -> Service:
        """What the front speaks to."""
        return self._service

    @property
    def url(self) -> str:
        """Where clients connect to, once started."""
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return f"{'https' if self._config.tls_certificate else 'http'}://{host}:{self._port}"

    @property
    def hub_endpoint(self) -> str:
        """Where workers connect to, once started."""
        return self._service.hub_endpoint

    async def start(self) -> None:
        """Serve; returns when both addresses take connections.

        Raises:
            StartFailed: an address cannot be bound; names it.
            CheckpointUnavailable: the tokenizer cannot be read.
            ModelError: its chat template does not compile, or the model's sampling defaults cannot be used.
            ConfigError: the file of API keys, or those of TLS, cannot be, or traces cannot be exported so.
        """
        tls = server_context(self._config.tls_certificate, self._config.tls_key)
        tokenizer = await asyncio.to_thread(Tokenizer, self._config.tokenizer)
        published = tokenizer.generation_config if self._config.generation_config == "auto" else {}
        defaults = SamplingDefaults.published(published)
        keys = read_keys(self._config.api_keys) if self._config.api_keys else ()
        check_classes(keys, self._config.slo)
        if self._inherit is None:
            self._listener = self._bind()
        try:
            await self._service.start()
            listener = self._listener
            if listener is None:
                assert self._inherit is not None
                listener = self._listener = await self._inherit(self._service) or self._bind()
            self._port = listener.getsockname()[1]
            traces = await self._begin_traces()
            config = FrontConfig(tool_format=self._config.tool_format, slo=self._config.slo)
            self._front = Front(self._service, tokenizer, config, Gatekeeper(keys), defaults, traces)
            self._server = _SignalFreeServer(
                uvicorn.Config(
                    self._front,
                    http=BoundedHttpProtocol,
                    ws="none",
                    lifespan="off",
                    log_config=None,
                    log_level="warning",
                    access_log=False,
                    server_header=False,
                    proxy_headers=False,
                    timeout_keep_alive=KEEP_ALIVE,
                    ssl_context_factory=None if tls is None else lambda *_: tls,
                    # uvicorn counts whole seconds; less than asked for would cut answers short.
                    timeout_graceful_shutdown=int(-(-self._config.stop_grace // 1)),
                )
            )
            self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="router-http")
            while not self._server.started:
                if self._task.done():
                    cause = None if self._task.cancelled() else self._task.exception()
                    raise StartFailed(f"router {self._config.name}: the HTTP server ended at once") from cause
                await asyncio.sleep(START_POLL)
        except BaseException:
            await self.stop()
            if self._listener is not None:
                self._listener.close()
            raise
        _log.info(
            "router %s serves %s at %s, hub %s", self._config.name, self._config.model, self.url, self.hub_endpoint
        )

    async def wait(self) -> None:
        """Return once stopped; raise what ended a loop of ours before that.

        Raises:
            StartFailed: the HTTP server, or a loop of the service, ended by itself.
        """
        assert self._task is not None, "known once started"
        stopped = asyncio.create_task(self._stopped.wait())
        loops = (self._task, *self._service.tasks)
        try:
            done, _ = await asyncio.wait([stopped, *loops], return_when=asyncio.FIRST_COMPLETED)
            if self._stopping or stopped in done:
                await stopped
                return
        finally:
            stopped.cancel()
        ended = done.pop()
        cause = None if ended.cancelled() else ended.exception()
        raise StartFailed(f"router {self._config.name}: {ended.get_name()} ended by itself: {cause!r}") from cause

    def share(self) -> socket.socket | None:
        """The socket that it listens at, for another router to listen at it too; None when it takes no connections."""
        if self._task is None or self._listener is None or self._listener.fileno() < 0:
            return None
        return self._listener

    async def leave(self, timeout: float) -> None:  # noqa: ASYNC109  clients' time, not the caller's
        """Take no new connection and wait, for ``timeout`` seconds at most, until clients have left the open ones.

        Each answer from now on tells its client to come by another connection, and what asks by this one meanwhile is
        served: who closes a connection at which a request is on its way makes that fail.
        """
        assert self._server is not None, "known once started"
        assert self._front is not None
        assert self._listener is not None
        self._front.end_watching()
        for each in self._server.servers:
            each.close()
        self._listener.close()
        # uvicorn makes its own list anew from the configured one, once a second.
        self._server.config.encoded_headers.append(CLOSE)
        self._server.server_state.default_headers.append(CLOSE)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._server.server_state.connections:  # noqa: ASYNC110  uvicorn tells nobody
                    await asyncio.sleep(LEAVE_POLL)

    async def stop(self) -> None:
        """Take no new connection, let open answers go on for the grace, then end everything."""
        self._stopping = True
        task, self._task = self._task, None
        if self._front is not None:
            self._front.end_watching()
        if task is not None and self._server is not None:
            self._server.should_exit = True
            done, _ = await asyncio.wait({task}, timeout=self._config.stop_grace + STOP_MARGIN)
            if not done:
                _log.warning("router %s: open answers were cut off", self._config.name)
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._front is not None:
            await self._front.close()
        await self._service.close()
        await self._tracing.aclose()
        self._stopped.set()

    async def _begin_traces(self) -> RequestTraces | None:
        config = self._config
        self._tracer = await self._tracing.enter_async_context(tracing(config.tracing, "router", config.name))
        if self._tracer is None:
            return None
        from router.request_trace import RequestTraces

        return RequestTraces(self._tracer, config.model)

    def _own_spans(self) -> OwnSpans | None:
        tracer = self._tracer
        return None if tracer is None else OwnSpans(self._config.name, tracer.exported, tracer.dropped)

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._config.host else socket.AF_INET
        # Named, it is that of each connection too, and asyncio then sends what is written at once; else the second
        # write of an answer, its first token, waits up to 40 ms for the client to acknowledge the first.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._config.host, self._config.port))
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            where = f"{self._config.host}:{self._config.port}"
            raise StartFailed(f"router {self._config.name} cannot listen at {where}: {error}") from error
        return listener
