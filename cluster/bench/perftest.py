"""UCX's own benchmark, ``ucx_perftest``: what UCX gives when nothing of ours is around it.

It comes with the package ``libucx-cu12`` (``libucx/bin``), and with Debian's ``ucx-utils``. It prints a rate and moves
one buffer again and again, so what it gives is a rate for large messages and no time for a list of blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kv_transfer.ucx.tuning import SETTINGS
from protocol.errors import ConnectionFailed

NAME = "ucx_perftest"
TESTS = ("tag_bw", "ucp_put_bw", "ucp_am_bw", "stream_bw")
MESSAGE_BYTES = (64 << 10, 1 << 20)
RUN_BYTES = 64 << 20
WARM_UP = 16
RUN_SECONDS = 30.0
OURS = ("ZCOPY_THRESH", "RNDV_THRESH")
"""Settings that are for our way of using UCX; the program does better without."""
PAUSE = 0.05
END_SECONDS = 1.0
RATE_COLUMN = -3
"""Of the last line: over the whole run, in MiB a second."""


@dataclass(frozen=True, slots=True)
class Program:
    """An installed one.

    Attributes:
        path: of the program.
        libraries: folder of UCX's libraries, where the loader does not know it.
    """

    path: Path
    libraries: Path | None


def find() -> Program | None:
    """The program that is installed here."""
    spec = find_spec("libucx")
    for folder in map(Path, (spec.submodule_search_locations or ()) if spec else ()):
        if (folder / "bin" / NAME).exists():
            return Program(folder / "bin" / NAME, folder / "lib")
    found = shutil.which(NAME)
    return None if found is None else Program(Path(found), None)


@dataclass(frozen=True, slots=True)
class Test:
    """One of its tests, with the message size.

    Attributes:
        name: the program's.
        message_bytes: of each message.
    """

    name: str
    message_bytes: int


class Perftest:
    """Runs the program against a second one of itself, on this machine.

    Args:
        program: which.
        tls: what UCX may go by.
    """

    def __init__(self, program: Program, tls: str) -> None:
        self._program = program
        self._environment = _environment(program, tls, os.environ)
        self._best: Test | None = None

    async def best(self) -> Test:
        """The test that gave most when each was run once; found when first asked for.

        Raises:
            ConnectionFailed: the program does not run.
        """
        if self._best is None:
            found = {}
            for test in [Test(name, size) for name in TESTS for size in MESSAGE_BYTES]:
                found[test] = await self.rate(test)
            self._best = max(found, key=found.__getitem__)
        return self._best

    async def rate(self, test: Test) -> float:
        """Bytes a second of one run; raises as :meth:`best`."""
        port = _free_port()
        listening = await self._started("-p", str(port))
        try:
            async with asyncio.timeout(RUN_SECONDS):
                while True:
                    told = await self._client(test, port)
                    if told is not None:
                        return told
                    if listening.returncode is not None:
                        raise ConnectionFailed(f"{NAME} does not listen: it ended with {listening.returncode}")
                    await asyncio.sleep(PAUSE)
        except TimeoutError as error:
            raise ConnectionFailed(f"{NAME} was not done in {RUN_SECONDS:.0f} seconds") from error
        finally:
            await _ended(listening)

    async def _client(self, test: Test, port: int) -> float | None:
        """The rate, or None when nobody listens there yet."""
        count = max(1, RUN_BYTES // test.message_bytes)
        client = await self._started(
            *("-p", str(port), "-t", test.name, "-s", str(test.message_bytes)),
            *("-n", str(count), "-w", str(WARM_UP), "-f", "127.0.0.1"),
        )
        try:
            out, _ = await client.communicate()
        finally:
            await _ended(client)
        return parse_rate(out.decode(errors="replace")) if client.returncode == 0 else None

    async def _started(self, *arguments: str) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                self._program.path,
                *arguments,
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise ConnectionFailed(f"{NAME} does not start: {error}") from error


def parse_rate(text: str) -> float:
    """Bytes a second, of what the program printed.

    Raises:
        ConnectionFailed: there is no figure.
    """
    lines = text.strip().splitlines()
    columns = lines[-1].split() if lines else []
    if len(columns) < 8 or not re.fullmatch(r"[\d.]+", columns[RATE_COLUMN]):
        raise ConnectionFailed(f"{NAME} printed no rate: {lines[-1] if lines else ''!r}")
    return float(columns[RATE_COLUMN]) * (1 << 20)


def _environment(program: Program, tls: str, environment: Mapping[str, str]) -> dict[str, str]:
    ours = {f"UCX_{name}": value for name, value in SETTINGS.items() if name not in OURS}
    found = {**ours, **environment, "UCX_TLS": tls, "UCX_NET_DEVICES": "lo"}
    if program.libraries is not None:
        known = environment.get("LD_LIBRARY_PATH")
        found["LD_LIBRARY_PATH"] = f"{program.libraries}:{known}" if known else str(program.libraries)
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _ended(process: asyncio.subprocess.Process) -> None:
    # Not killed at once: asyncio loses the status of a process that ends by itself in this very moment.
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), END_SECONDS)
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
