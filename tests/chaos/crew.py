"""Processes that can be told, stopped and killed, as the test has them; ``nursery.py`` makes them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from nursery import LINE_BYTES
from pace import allowed

PATIENCE = 120.0
LONGEST = 600.0
"""Seconds that anything gets on an idle machine, and on any; nothing of this is about how fast it is."""
PAUSE = 0.001


def patience() -> float:
    """Seconds until it is taken that something will not come, on a machine as busy as this is now."""
    return min(allowed(PATIENCE), LONGEST)


async def until(condition: Callable[[], object], what: str, limit: float | None = None) -> None:
    """Wait for a condition, and fail with its name when it does not come."""
    limit = patience() if limit is None else limit
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"{what} did not come in {limit} s"
        await asyncio.sleep(PAUSE)


async def _readable(descriptor: int) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


class Hand:
    """One process of the crew.

    Attributes:
        pid: of the process.
        gone: whether its connection has ended.
        heard: answers by the word that names them and the thing they are about.
    """

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.gone = False
        self.heard: dict[tuple[str, str], dict[str, object]] = {}
        self._writer = writer
        self._questions = itertools.count()
        self._listening = asyncio.create_task(self._listen(reader))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            async for line in reader:
                words = json.loads(line)
                self.heard[(words.pop("word"), words.pop("about"))] = words
        self.gone = True
        self._writer.close()

    def tell(self, word: str, **words: object) -> None:
        self._writer.write(json.dumps({"word": word, **words}).encode() + b"\n")

    async def answer(self, word: str, about: str, limit: float | None = None) -> dict[str, object]:
        """What it says about a thing; each answer is given once."""
        await until(lambda: self.gone or (word, about) in self.heard, f"{word} of {about}", limit)
        assert (word, about) in self.heard, f"process {self.pid} ended before it said {word} of {about}"
        return self.heard.pop((word, about))

    async def ask(self, word: str, limit: float | None = None, **words: object) -> dict[str, object]:
        about = f"question {next(self._questions)}"
        self.tell(word, about=about, **words)
        return await self.answer(word, about, limit)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def kill(self) -> None:
        """SIGKILL, and wait until the kernel has ended the process, and with it whatever it had open."""
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self.pid)
            try:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                await _readable(descriptor)
            finally:
                os.close(descriptor)

    async def stop(self) -> None:
        """SIGSTOP, and wait until the kernel says that every thread is stopped."""
        self.signal(signal.SIGSTOP)
        await until(lambda: self._states() <= {"T"}, "the stop")

    def _states(self) -> set[str]:
        found: set[str] = set()
        for stat in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            with suppress(OSError):
                found.add(stat.read_text().rpartition(")")[2].split()[0])
        return found

    async def end(self) -> None:
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        await self._listening
        with suppress(ConnectionError):
            await self._writer.wait_closed()


class Crew:
    """Hires hands; see :func:`crew`."""

    def __init__(self, nursery: asyncio.subprocess.Process, home: str) -> None:
        self._nursery = nursery
        self._home = home
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Hand]] = {}
        self.hands: list[Hand] = []

    async def hire(self, **order: object) -> Hand:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        assert self._nursery.stdin is not None
        line = json.dumps({**order, "number": number, "home": self._home})
        self._nursery.stdin.write(line.encode() + b"\n")
        return await asyncio.wait_for(self._waiting[number], patience())

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        words = json.loads(await reader.readline())
        hand = Hand(words["pid"], reader, writer)
        self.hands.append(hand)
        self._waiting.pop(words["number"]).set_result(hand)


@asynccontextmanager
async def crew(module: str, folder: Path) -> AsyncIterator[Crew]:
    """A crew whose hands live as ``module`` says; at the end not one of them is left."""
    script = Path(__file__).with_name("nursery.py")
    pipe = asyncio.subprocess.PIPE
    nursery = await asyncio.create_subprocess_exec(sys.executable, str(script), module, stdin=pipe, stdout=pipe)
    home = str(folder / "crew")
    made = Crew(nursery, home)
    server = await asyncio.start_unix_server(made.meet, home, limit=LINE_BYTES)
    try:
        assert nursery.stdout is not None
        # Its imports take a while on a busy machine.
        assert await asyncio.wait_for(nursery.stdout.readline(), patience()) == b"ready\n"
        yield made
    finally:
        for hand in made.hands:
            await hand.end()
        server.close()
        await server.wait_closed()
        assert nursery.stdin is not None
        nursery.stdin.close()
        await nursery.wait()
