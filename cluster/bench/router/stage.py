"""A router and its workers in processes of their own, as the measuring side has them.

Life cycle of a :func:`staged` stage: three processes started, each ready -> looked at -> ended, none is left.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import msgspec

from cluster.bench.ending import to_the_end
from cluster.bench.router.part import Look, Part, Question
from protocol.errors import ConnectionFailed, StartFailed
from router.tokenizer import Tokenizer

START_SECONDS = 60.0
END_SECONDS = 10.0
SAMPLE = " The ferry carries the blocks across the water, and the blocks arrive in order."
"""What every answer says, over and over."""
POLL = 0.002


class Process:
    """One part; see :func:`staged`."""

    def __init__(self, process: asyncio.subprocess.Process, first: Look) -> None:
        self.first = first
        self._process = process

    async def look(self, step: float | None = None) -> Look:
        """How it is; a decode worker goes on at the pace of ``step``.

        Raises:
            ConnectionFailed: it has ended.
        """
        assert self._process.stdin is not None, "asked for"
        with suppress(ConnectionError):
            self._process.stdin.write(msgspec.json.encode(Question(step=step)) + b"\n")
        return await _hear(self._process)


class Stage:
    """All parts.

    Attributes:
        model: served name.
        router, prefill, decode: the processes.
        text: tokens that an answer goes through.
    """

    def __init__(self, model: str, router: Process, prefill: Process, decode: Process, text: tuple[int, ...]) -> None:
        self.model = model
        self.router, self.prefill, self.decode = router, prefill, decode
        self.text = text

    @property
    def url(self) -> str:
        """Of the router."""
        return self.router.first.url


@asynccontextmanager
async def staged(tokenizer: Path) -> AsyncIterator[Stage]:
    """A router that serves with the tokenizer of that directory, on a core of its own where there are two.

    Raises:
        StartFailed: a part did not come up.
        CheckpointUnavailable: the tokenizer cannot be read.
    """
    reader = Tokenizer(tokenizer)
    text = tuple(token for token in reader.encode(SAMPLE, add_special_tokens=False) if not reader.is_silent(token))
    cores = sorted(os.sched_getaffinity(0))
    own, others = (cores[0], cores[-1]) if len(cores) > 1 else (None, None)
    model = tokenizer.name
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(
            _process(Part(role=None, model=model, tokenizer=str(tokenizer), core=own))
        )
        workers = [
            await stack.enter_async_context(
                _process(
                    Part(
                        role=role,
                        model=model,
                        core=others,
                        hub=router.first.hub,
                        vocab_size=reader.vocab_size,
                        text=text,
                    )
                )
            )
            for role in ("prefill", "decode")
        ]
        if others is not None:
            os.sched_setaffinity(0, {others})
            stack.callback(os.sched_setaffinity, 0, cores)
        yield Stage(model, router, workers[0], workers[1], text)


@asynccontextmanager
async def _process(part: Part) -> AsyncIterator[Process]:
    pipe = asyncio.subprocess.PIPE
    argument = msgspec.json.encode(part).decode()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cluster.bench.router.part", argument, stdin=pipe, stdout=pipe
    )
    try:
        try:
            first = await asyncio.wait_for(_hear(process), START_SECONDS)
        except (TimeoutError, ConnectionFailed) as error:
            raise StartFailed(f"the {part.role or 'router'} of the benchmark did not come up") from error
        yield Process(process, first)
    finally:
        await to_the_end(_end(process))


async def _hear(process: asyncio.subprocess.Process) -> Look:
    assert process.stdout is not None, "asked for"
    line = await process.stdout.readline()
    if not line:
        raise ConnectionFailed(f"process {process.pid} of the benchmark has ended")
    return msgspec.json.decode(line, type=Look)


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None, "asked for"
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), END_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
