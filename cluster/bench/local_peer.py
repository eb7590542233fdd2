"""The far end of a benchmark within one machine: a second process of the same command.

Its standard input is a pipe that this process holds: whatever way this process ends, the other one sees the pipe's end
and ends too.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from protocol.errors import StartFailed

START_SECONDS = 60.0
END_SECONDS = 5.0
LISTENING = "listening at"


@asynccontextmanager
async def local_peer(max_pool: int) -> AsyncIterator[tuple[str, int]]:
    """Host and port of a far end that lives as long as this context.

    Raises:
        StartFailed: it did not start.
    """
    # A session of its own, so that Ctrl-C reaches this process only, which then ends the other in order.
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "cluster", "bench", "transfer"),
        *("--listen", "127.0.0.1:0", "--tied", "--max-pool", str(max_pool)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield await _address(process)
    finally:
        assert process.stdin is not None, "asked for"
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_SECONDS)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _address(process: asyncio.subprocess.Process) -> tuple[str, int]:
    assert process.stdout is not None, "asked for"
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_SECONDS)
    except TimeoutError as error:
        raise StartFailed(f"the receiving process did not start in {START_SECONDS:.0f} seconds") from error
    found = re.fullmatch(rf"{LISTENING} (\S+):(\d+)\n", line.decode(errors="replace"))
    if not found:
        raise StartFailed("the receiving process did not start; what it said stands above")
    return found[1], int(found[2])
