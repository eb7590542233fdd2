"""A second process for the contract tests, run by ``far_end.py``, that can be stopped and killed."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from ferry import GENERATION, PATIENCE, POISON, Harbor, until
from pace import allowed

from kv_transfer.transport import TransportConfig

LARGE = 1 << 20
MANY = 64
TRIES = 60


def impatient(seconds: float) -> tuple[TransportConfig, str]:
    """Settings that give up a peer after ``seconds`` without progress, more if all is slow; and what is said then."""
    config = TransportConfig(timeout=round(min(allowed(seconds), 20.0), 1))
    return config, re.escape(f"no progress for {config.timeout} seconds")


class FarEnd:
    """The other process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    def tell(self, **words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words).encode() + b"\n")

    async def hear(self) -> dict[str, object]:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), PATIENCE)
        assert line, "the other process ended"
        return dict(json.loads(line))

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    async def stop(self) -> None:
        """SIGSTOP, and wait until the kernel says it is stopped."""
        self.signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        await until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    async def end(self) -> None:
        # Killed a moment ago, it may be gone before the loop has heard of it.
        with suppress(ProcessLookupError):
            if self.process.returncode is None:
                self.signal(signal.SIGCONT)
                self.process.kill()
        await self.process.communicate()


Start = Callable[..., Awaitable[FarEnd]]


async def caught_midway(far: FarEnd, there: Harbor) -> bytes:
    """Have the other process ship its pool, and stop it (SIGSTOP) in the middle of it; gives the window's ticket."""
    for _ in range(TRIES):
        there.poison()
        there.landed.clear()
        ticket = there.open(range(MANY))
        far.tell(address=there.address, ticket=ticket.hex(), blocks=list(range(MANY)), generation=GENERATION)
        await until(lambda: there.pool[0, -1] != POISON)
        await far.stop()
        # What the kernel still holds of it arrives meanwhile; midway it is when that does not complete the pool.
        if not there.landed and (there.pool[:, -1] == POISON).any():
            return ticket
        far.signal(signal.SIGCONT)
        assert (await far.hear())["result"] == "shipped"
        await there.receiver.close_window(ticket)
    pytest.fail("the ship was over too soon every time")
