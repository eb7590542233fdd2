"""What is measured of a router: the first token, streams side by side, clients that leave, memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.bench.router.figures import MemoryRow, RouterReport, StreamRow
from cluster.bench.router.stage import POLL, Stage, staged
from cluster.bench.router.streams import Connection, Seen, request
from cluster.bench.statistics import latency
from protocol.errors import ConfigError, StartFailed
from router.client import AsyncClient

PROMPT_TOKENS = 64
AT_ONCE = 32
"""Short requests that are open at a time."""
SHORT_TOKENS = 2
READY_SECONDS = 30.0
CANCEL_SECONDS = 5.0
ENDLESS = 100_000
"""Tokens of an answer that its client does not wait for."""
SLOW = 0.05
"""Seconds between two tokens where their pace is of no matter."""

OnStage = Callable[[str], None]
"""Called with what is measured next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """What to measure; the fields are the command's options.

    Raises:
        ConfigError: a value is out of range; names the field and the value.
    """

    tokenizer: Path
    runs: int
    streams: tuple[int, ...]
    tokens_per_second: float
    seconds: float
    requests: int

    def __post_init__(self) -> None:
        for streams in self.streams:
            if not 1 <= streams <= 4096:
                raise ConfigError(f"streams must lie in [1, 4096], got {streams}", field="streams")


async def measure_router(options: RouterOptions, on_stage: OnStage) -> RouterReport:
    """Measure everything.

    Raises:
        StartFailed: a process of the benchmark did not come up.
        ConnectionFailed: one of them ended, or an answer was not whole.
    """
    async with staged(options.tokenizer) as stage:
        await _ready(stage)
        on_stage("first tokens")
        first = await _first_tokens(stage, options.runs)
        on_stage("clients that leave")
        cancelled = await _leaving(stage, max(1, options.runs // 10))
        rows = []
        for streams in options.streams:
            for wanted in (options.tokens_per_second, None):
                on_stage(f"{streams} streams, {'as fast as can be' if wanted is None else f'{wanted:g} tokens/s'}")
                rows.append(await _streams(stage, streams, wanted, options.seconds, options.tokens_per_second))
        on_stage(f"{options.requests} requests")
        memory = await _memory(stage, options.requests) if options.requests else None
        return RouterReport(
            model=stage.model,
            first_token=latency(first),
            cancelled=latency(cancelled),
            streams=tuple(rows),
            memory=memory,
        )


def _body(stage: Stage, tokens: int) -> bytes:
    prompt = (stage.text * PROMPT_TOKENS)[:PROMPT_TOKENS]
    return request(stage.model, prompt, tokens)


async def _ready(stage: Stage) -> None:
    try:
        async with AsyncClient(stage.url) as client, asyncio.timeout(READY_SECONDS):
            while not (await client.health()).ready:  # noqa: ASYNC110 -- no event tells of it
                await asyncio.sleep(POLL)
    except TimeoutError as error:
        raise StartFailed(f"the router knew no workers after {READY_SECONDS:g} s") from error


async def _first_tokens(stage: Stage, runs: int) -> list[float]:
    connection, body, found = await Connection(stage.url).open(), _body(stage, SHORT_TOKENS), []
    for _ in range(runs):
        connection.ask(body)
        found.append((await connection.answered()).first)
    connection.leave()
    return found


async def _leaving(stage: Stage, runs: int) -> list[float]:
    await stage.decode.look(SLOW)
    body, found = _body(stage, ENDLESS), []
    for _ in range(runs):
        connection = await Connection(stage.url).open()
        connection.ask(body)
        await connection.begun()
        for worker in (stage.prefill, stage.decode):
            await worker.look()
        left, cancels = connection.leave(), []
        for worker in (stage.prefill, stage.decode):
            async with asyncio.timeout(CANCEL_SECONDS):
                while not (told := (await worker.look()).cancels):
                    pass
            cancels.append(told[0])
        found.append(max(cancels) - left)
    return found


async def _streams(stage: Stage, streams: int, wanted: float | None, seconds: float, rate: float) -> StreamRow:
    await stage.decode.look(0.0 if wanted is None else streams / wanted)
    tokens = max(SHORT_TOKENS, round(seconds * rate / streams))
    body = _body(stage, tokens)
    connections = await asyncio.gather(*(Connection(stage.url).open() for _ in range(streams)))
    before, began = await stage.router.look(), time.perf_counter()
    for connection in connections:
        connection.ask(body)
    seen: list[Seen] = await asyncio.gather(*(connection.answered() for connection in connections))
    took, after = time.perf_counter() - began, await stage.router.look()
    for connection in connections:
        connection.leave()
    return StreamRow(
        streams=streams,
        wanted=wanted,
        tokens=tokens * streams,
        # The last event of each answer tells its end and no token.
        events=sum(each.events - 1 for each in seen),
        seconds=took,
        cpu=after.cpu - before.cpu,
        first=latency([each.first for each in seen]),
    )


async def _memory(stage: Stage, requests: int) -> MemoryRow:
    await stage.decode.look(0.0)
    body, begun, ended = _body(stage, SHORT_TOKENS), 0, 0
    warm = asyncio.Event()

    async def keep_asking() -> None:
        nonlocal begun, ended
        connection = await Connection(stage.url).open()
        while begun < requests:
            begun += 1
            connection.ask(body)
            await connection.answered()
            ended += 1
            if ended > requests // 10:
                warm.set()
        connection.leave()

    before, began = await stage.router.look(), time.perf_counter()
    try:
        async with asyncio.TaskGroup() as asking:
            for _ in range(AT_ONCE):
                asking.create_task(keep_asking())
            await warm.wait()
            early = (await stage.router.look()).rss
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
    after = await stage.router.look()
    return MemoryRow(
        requests=requests,
        early=early,
        late=after.rss,
        seconds=time.perf_counter() - began,
        cpu=after.cpu - before.cpu,
    )
