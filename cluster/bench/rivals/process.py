"""One running :mod:`~cluster.bench.rivals.program`.

Life cycle: started -> asked, one order at a time -> ended with its standard input, or killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

from cluster.bench.ending import to_the_end
from protocol.errors import ConfigError, ConnectionFailed

PROGRAM = Path(__file__).with_name("program.py")
LINE_BYTES = 64 << 20
"""Longest answer."""
END_SECONDS = 5.0
TOLD_CHARACTERS = 300


class RivalProcess:
    """See the module; made by :func:`started`."""

    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self._process = process
        self._errors = errors

    async def ask(self, do: str, **values: object) -> dict[str, object]:
        """Give an order and await its answer.

        Raises:
            ConfigError: the rival is not installed.
            ConnectionFailed: the order failed, or the program ended.
        """
        assert self._process.stdin is not None, "asked for"
        assert self._process.stdout is not None, "asked for"
        try:
            self._process.stdin.write(json.dumps({"do": do, **values}).encode() + b"\n")
            await self._process.stdin.drain()
            line = await self._process.stdout.readline()
            answer = json.loads(line) if line else None
        except (OSError, ValueError) as error:
            raise ConnectionFailed(f"no answer: {error}{self._last_words()}") from error
        if not isinstance(answer, dict):
            raise ConnectionFailed(f"its process ended{self._last_words()}")
        if "missing" in answer:
            raise ConfigError(str(answer["missing"]), field="vs")
        if "error" in answer:
            raise ConnectionFailed(str(answer["error"])[:TOLD_CHARACTERS])
        return answer

    async def end(self) -> None:
        """Have it end; kills it where it does not. May be called more than once."""
        assert self._process.stdin is not None, "asked for"
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), END_SECONDS)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1][-TOLD_CHARACTERS:]}" if lines else ""


@asynccontextmanager
async def started(python: str, settings: Mapping[str, str], answerer: Path) -> AsyncIterator[RivalProcess]:
    """The program in the interpreter ``python``, with ``settings`` in its environment and the file ``answerer``.

    Raises:
        ConfigError: there is no such interpreter.
    """
    with tempfile.TemporaryFile() as errors:
        try:
            # A session of its own, so that Ctrl-C reaches this process only, which then ends the other in order.
            process = await asyncio.create_subprocess_exec(
                *(python, "-P", str(PROGRAM), str(answerer)),
                env={**os.environ, **settings},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                limit=LINE_BYTES,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(
                f"vs_python must be an interpreter, got {python!r}: {error}", field="vs_python"
            ) from error
        rival = RivalProcess(process, errors)
        try:
            yield rival
        finally:
            await to_the_end(rival.end())
