"""One process of the benchmark: the router, or a worker that computes nothing. ``python -m`` starts it.

Life cycle: told by its argument what to be, it says that it is ready, answers each line of its standard input by one,
and ends with it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import AsyncExitStack

import msgspec
import psutil

from cluster.bench.router.null_worker import NullWorker
from cluster.event_loop import new_loop
from protocol.ids import Role
from router.config import RouterConfig
from router.server import RouterServer

MAX_REQUESTS = 8192


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a process is to be.

    Attributes:
        role: None for the router.
        model: served name.
        tokenizer: directory with the tokenizer's files (router).
        core: number of the core that it keeps to; None for any.
        hub: where the router is found (worker).
        vocab_size, text: see :class:`NullWorker` (worker).
    """

    role: Role | None
    model: str
    tokenizer: str = ""
    core: int | None = None
    hub: str = ""
    vocab_size: int = 0
    text: tuple[int, ...] = ()


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How are you; and, to a decode worker, go on at this pace.

    Attributes:
        step: seconds between two tokens of a sequence; None leaves it.
    """

    step: float | None = None


class Look(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a process is.

    Attributes:
        cpu: seconds of it that it has used, over all threads.
        rss: bytes of memory.
        cancels: when cancels came since the last look, on the machine's monotonic clock.
        url, hub: of a router.
    """

    cpu: float
    rss: int
    cancels: tuple[float, ...] = ()
    url: str = ""
    hub: str = ""


async def live(part: Part) -> None:
    """Be what is asked for until standard input ends."""
    if part.core is not None:
        os.sched_setaffinity(0, {part.core})
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with AsyncExitStack() as stack:
        router: RouterServer | None = None
        worker: NullWorker | None = None
        if part.role is None:
            # Hundreds of streams on one core may keep it from its workers' heartbeats for a while.
            router = RouterServer(
                RouterConfig(
                    model=part.model,
                    tokenizer=part.tokenizer,
                    port=0,
                    max_requests=MAX_REQUESTS,
                    worker_timeout=30.0,
                    stop_grace=1.0,
                )
            )
            stack.push_async_callback(router.stop)
            await router.start()
        else:
            worker = NullWorker(part.role, part.model, part.vocab_size, part.hub, part.text)
            stack.push_async_callback(worker.close)
            worker.start()
        _say(router, worker)
        async for line in lines:
            question = msgspec.json.decode(line, type=Question)
            if worker is not None and question.step is not None:
                worker.step = question.step
            _say(router, worker)


def _say(router: RouterServer | None, worker: NullWorker | None) -> None:
    cancels: list[float] = []
    if worker is not None:
        cancels, worker.cancels = worker.cancels, []
    look = Look(
        cpu=time.process_time(),
        rss=psutil.Process().memory_info().rss,
        cancels=tuple(cancels),
        url="" if router is None else router.url,
        hub="" if router is None else router.hub_endpoint,
    )
    sys.stdout.buffer.write(msgspec.json.encode(look) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    """Be the part that the one argument says, as JSON."""
    part = msgspec.json.decode(sys.argv[1], type=Part)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(live(part))


if __name__ == "__main__":
    main()
