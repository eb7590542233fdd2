"""A second process for the contract tests, run by ``far_end.py``, that can be stopped and killed."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from ferry import until

LARGE = 1 << 20
MANY = 64


class FarEnd:
    """The other process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    def tell(self, **words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words).encode() + b"\n")

    async def hear(self) -> dict[str, object]:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 30)
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
