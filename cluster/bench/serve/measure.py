"""Plays a trace against one server or two, and takes the figures."""

from __future__ import annotations

import dataclasses
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice, takewhile

from cluster.bench.machine import this_machine
from cluster.bench.serve.answer import Stopwatch
from cluster.bench.serve.drive import drive
from cluster.bench.serve.figures import ServeReport, Taken, figures_of, versus_of
from cluster.bench.serve.pacer import ClosedLoop, OpenLoop, Order, Pacer
from cluster.bench.serve.prompt import PromptMaker
from cluster.bench.serve.server import Address, Server, reached
from cluster.bench.serve.target import Target
from cluster.bench.traces.options import TraceOptions, within
from cluster.bench.traces.registry import stream_trace
from cluster.bench.traces.request import TraceRequest
from protocol.errors import ConfigError

WARM_AT_ONCE = 4
MAX_CONCURRENCY = 65_536
clock = time.perf_counter

OnAnswer = Callable[[bool], None]
"""Called for each answer, with whether it was one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What to play against whom.

    Attributes:
        servers: one, or two that take turns.
        trace: what to play; longer requests than every server takes are cut besides.
        concurrency: so many are kept under way, whatever the trace's times; None goes by these.
        seconds: of the trace, or of a fixed concurrency; None for all.
        slice: requests until it is the other server's turn.
        target: that answers are held to.
        warm: requests of another seed before, which do not count.
        patience: seconds that an answer may take.
        token_ids: the least and the most in a prompt.
        salt: of prompts; None draws one, so that no cache has seen them.

    Raises:
        ConfigError: a value is out of range, or two do not go together; names the field.
    """

    servers: tuple[Address, ...]
    trace: TraceOptions
    concurrency: int | None = None
    seconds: float | None = None
    slice: int = 32
    target: Target | None = None
    warm: int = 4
    patience: float = 600.0
    token_ids: tuple[int, int] = (100, 31_999)
    salt: str | None = None

    def __post_init__(self) -> None:
        assert 1 <= len(self.servers) <= 2, "one, or two that take turns"
        least, most = self.token_ids
        within("slice", self.slice, 1, 1 << 20)
        within("warmup", self.warm, 0, 10_000)
        within("timeout", self.patience, 0.001, 86_400)
        within("vocabulary", least, 0, most)
        within("vocabulary", most, 0, (1 << 31) - 1)
        if self.seconds is not None:
            within("seconds", self.seconds, 0.001, 86_400)
        if self.salt is not None and not 1 <= len(self.salt.encode()) <= 32:
            raise ConfigError(f"salt must have 1 to 32 bytes, got {self.salt!r}", field="salt")
        if self.concurrency is None:
            return
        within("concurrency", self.concurrency, 1, MAX_CONCURRENCY)
        if self.seconds is not None and len(self.servers) > 1:
            raise ConfigError("seconds does not go with concurrency and two servers: say requests", field="seconds")


async def measure_serve(options: ServeOptions, on_answer: OnAnswer) -> ServeReport:
    """Reach the servers, warm them up, and play the trace.

    Raises:
        ConfigError: see :func:`cluster.bench.serve.server.reached` and :func:`stream_trace`.
        ConnectionFailed, KVFerryError: a server does not answer, or refuses, before the trace begins.
    """
    stream_trace(options.trace)  # a trace that cannot be is told before anybody is asked
    salt = secrets.token_hex(8) if options.salt is None else options.salt
    probes = PromptMaker(secrets.token_hex(8), options.token_ids)
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(reached(address, probes)) for address in options.servers]
        limits = [server.max_tokens for server in servers if server.max_tokens is not None]
        trace = dataclasses.replace(options.trace, max_tokens=min([options.trace.max_tokens, *limits]))
        requests = _played(trace, None if options.concurrency is not None else options.seconds)
        for server in servers:
            await _warm_up(server, trace, options, probes)
        # Each server has prompts of its own, so that two addresses of one do not share its cache.
        prompts = [PromptMaker(f"{salt}{place}", options.token_ids) for place in range(len(servers))]
        taken = [Taken() for _ in servers]
        cpu, began = time.process_time(), clock()
        rng, index, begin = random.Random(trace.seed), 0, 0.0  # noqa: S311 -- turns
        for part in _slices(requests, options):
            for place in rng.sample(range(len(servers)), len(servers)):
                run = _Run(servers[place], prompts[place], taken[place], options, on_answer, began, index)
                await run.play(part, begin)
            index = max(len(each.records) for each in taken)
            begin = part[-1].at if isinstance(part, list) else begin
        if not taken[0].records:
            raise ConfigError(f"the trace has no request in its first {options.seconds} s", field="seconds")
        cpu = (time.process_time() - cpu) / (clock() - began)
        figures = tuple(
            figures_of(
                each,
                url=server.url,
                model=server.model,
                dialect=server.dialect,
                open_loop=options.concurrency is None,
                target=options.target,
            )
            for server, each in zip(servers, taken, strict=True)
        )
    records = tuple(tuple(sorted(each.records, key=lambda record: record.index)) for each in taken)
    return ServeReport(
        kvferry=version("kvferry"),
        machine=this_machine(),
        trace=trace,
        concurrency=options.concurrency,
        slice=options.slice if len(servers) > 1 else None,
        salt=salt,
        target=options.target,
        cpu=cpu,
        servers=figures,
        versus=versus_of(figures[0], figures[1], records) if len(servers) > 1 else None,
        records=records,
    )


def _played(trace: TraceOptions, seconds: float | None) -> Iterator[TraceRequest]:
    requests = stream_trace(trace)
    return requests if seconds is None else takewhile(lambda request: request.at <= seconds, requests)


def _slices(requests: Iterator[TraceRequest], options: ServeOptions) -> Iterator[Iterable[TraceRequest]]:
    """What a server has in one go: of two the same for both, of one all."""
    if len(options.servers) == 1:
        yield requests
        return
    while part := list(islice(requests, options.slice)):
        yield part


async def _warm_up(server: Server, trace: TraceOptions, options: ServeOptions, prompts: PromptMaker) -> None:
    if not options.warm:
        return
    warm = dataclasses.replace(trace, requests=options.warm, seed=trace.seed + 1)
    alone = dataclasses.replace(options, concurrency=WARM_AT_ONCE, seconds=None, servers=options.servers[:1])
    run = _Run(server, prompts, Taken(), alone, lambda _: None, clock(), 0)
    await run.play(stream_trace(warm), 0.0)


class _Run:
    """One server's turn with some requests."""

    def __init__(
        self,
        server: Server,
        prompts: PromptMaker,
        taken: Taken,
        options: ServeOptions,
        on_answer: OnAnswer,
        began: float,
        index: int,
    ) -> None:
        self._server, self._prompts, self._taken = server, prompts, taken
        self._options, self._on_answer, self._began, self._index = options, on_answer, began, index
        self._last_due = self._last_sent = self._last_end = 0.0

    async def play(self, requests: Iterable[TraceRequest], begin: float) -> None:
        """Send them all and wait for their answers; the time ``begin`` of the trace is now."""
        start = clock()
        self._last_due = self._last_sent = self._last_end = start
        await drive(self._pacer(requests, start, begin), self._ask, clock)
        self._taken.scheduled += self._last_due - start
        self._taken.sent += self._last_sent - start
        self._taken.seconds += self._last_end - start

    def _pacer(self, requests: Iterable[TraceRequest], start: float, begin: float) -> Pacer:
        concurrency, seconds = self._options.concurrency, self._options.seconds
        if concurrency is None:
            return OpenLoop(requests, start=start, begin=begin)
        return ClosedLoop(requests, concurrency=concurrency, until=None if seconds is None else start + seconds)

    async def _ask(self, order: Order) -> None:
        index, self._index = self._index, self._index + 1
        body = self._server.body(self._prompts, order.request)
        watch = Stopwatch(due=order.due, now=clock())
        error = await self._server.stream(body, watch, clock, self._options.patience)
        ended = clock()
        record = watch.record(index, began=self._began, asked=order.request.prompt_tokens, now=ended, error=error)
        self._last_due = max(self._last_due, order.due)
        self._last_sent = max(self._last_sent, order.due + record.late)
        self._last_end = max(self._last_end, ended)
        self._taken.records.append(record)
        self._taken.wanted[index] = order.request.output_tokens
        if record.error is None:
            self._taken.gaps += watch.gaps
        self._on_answer(record.error is None)
