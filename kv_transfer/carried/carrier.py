"""A worker's hold on one carrier. Lives on the event loop.

Life cycle: started -> introduced -> connected -> moves -> closed; lost at any time. Closed means that its process has
been reaped: from then on nobody but us has the staging.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kv_transfer.carried.library import Library
from kv_transfer.carried.orders import MAX_INTRODUCTION, ORDER, Order, Report
from kv_transfer.carried.staging import SLOTS, Staging
from kv_transfer.ucx import tuning
from kv_transfer.ucx.loop_thread import settled, streams
from protocol.errors import ChannelLost, KVFerryError

START_SECONDS = 60.0
"""To load its library on a busy machine."""
GRACE_SECONDS = 0.5
"""To end by itself, and so take back what the library keeps in /dev/shm, before it is killed."""
ROOT = Path(__file__).parents[2]


class Carrier:
    """See the module.

    Args:
        library: that it loads.
        on_moved: called with each slot that has been moved.
        on_lost: called once, with why, when it moves no more; not after :meth:`close`.
        receives: which end it is of.

    Attributes:
        staging: what it shares.
        release: of its library, once it is introduced.

    Raises:
        ConfigError: the library is not here.
        ChannelLost: there is no room for another process.
    """

    def __init__(
        self,
        library: Library,
        on_moved: Callable[[int], None],
        on_lost: Callable[[KVFerryError], None],
        *,
        receives: bool,
    ) -> None:
        module = library.require()
        self._on_moved = on_moved
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self.release = ""
        self._introduced: asyncio.Future[bytes] = self._loop.create_future()
        self._connected: asyncio.Future[None] = self._loop.create_future()
        try:
            self.staging = Staging()
            ours, theirs = socket.socketpair()
            try:
                self._process = _spawn(library.scheme, module, theirs, self.staging.descriptor, receives=receives)
            except OSError:
                ours.close()
                raise
            finally:
                theirs.close()
                self.staging.close()
        except OSError as error:
            raise ChannelLost(f"cannot start a carrier: {error}") from error
        ours.setblocking(False)
        self._socket = ours
        self._writer: asyncio.StreamWriter | None = None
        self._listening = self._loop.create_task(self._listen())
        self._closing: asyncio.Task[None] | None = None

    async def introduced(self) -> bytes:
        """What the peer's carrier must know.

        Raises:
            ChannelLost: it is lost, or takes too long.
        """
        return await self._within(self._introduced)

    async def connect(self, peer: bytes, key: bytes) -> None:
        """Have it reach the peer's carrier.

        Args:
            peer: what that has said of itself.
            key: that only the two ends know; empty where the cluster has no secret.

        Raises:
            ChannelLost: it is lost, or takes too long.
        """
        self._tell(Order.CONNECT, len(key), text=key + peer)
        await self._within(self._connected)

    def move(self, slot: int, nbytes: int) -> None:
        """Have it send, or receive, the first bytes of a slot."""
        self._tell(Order.MOVE, slot, nbytes)

    def free(self, slot: int) -> None:
        """Tell it that the other end has the slot's bytes."""
        self._tell(Order.FREE, slot)

    async def close(self) -> None:
        """End it; when this returns its process has been reaped."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        await settled({self._closing})

    async def _close(self) -> None:
        self._listening.cancel()
        await settled({self._listening})
        self._socket.close()
        for future in (self._introduced, self._connected):
            future.cancel()
        if self._process.poll() is not None:
            return
        descriptor = os.pidfd_open(self._process.pid)
        ended = asyncio.Event()
        self._loop.add_reader(descriptor, ended.set)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACE_SECONDS):
                    await ended.wait()
            self._process.send_signal(signal.SIGKILL)
            await ended.wait()
        finally:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
            self._process.wait()

    async def _within(self, future: asyncio.Future[bytes] | asyncio.Future[None]) -> bytes:
        done, _ = await asyncio.wait({future}, timeout=START_SECONDS)
        if not done:
            raise ChannelLost(f"the carrier did not start within {START_SECONDS} seconds")
        if future.cancelled():
            raise ChannelLost("the carrier was closed")
        return future.result() or b""

    def _tell(self, order: Order, slot: int = 0, nbytes: int = 0, text: bytes = b"") -> None:
        if self._writer is not None:
            self._writer.write(ORDER.pack(order, slot, len(text) or nbytes) + text)

    async def _listen(self) -> None:
        try:
            reader, self._writer = await streams(self._socket)
            while True:
                report, slot, length = ORDER.unpack(await reader.readexactly(ORDER.size))
                text = await reader.readexactly(length) if length <= MAX_INTRODUCTION else b""
                self._hear(Report(report), slot, text)
        except (OSError, asyncio.IncompleteReadError):
            self._lose(ChannelLost(f"the carrier ended: {await self._how()}"))
        except KVFerryError as error:
            self._lose(error)
        finally:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.transport.abort()

    def _hear(self, report: Report, slot: int, text: bytes) -> None:
        match report:
            case Report.INTRODUCED:
                end = 1 + text[0]
                self.release = text[1:end].decode(errors="replace")
                self._introduced.set_result(text[end:])
            case Report.CONNECTED:
                self._connected.set_result(None)
            case Report.MOVED:
                assert slot < SLOTS, "a slot of ours"
                self._on_moved(slot)
            case Report.FAILED:
                raise ChannelLost(f"the carrier failed: {text.decode(errors='replace')}")

    async def _how(self) -> str:
        for _ in range(20):
            code = self._process.poll()
            if code is not None:
                return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            await asyncio.sleep(0.01)
        return "it closed its socket"

    def _lose(self, error: KVFerryError) -> None:
        for future in (self._introduced, self._connected):
            if not future.done():
                future.set_exception(error)
                # Nobody may be waiting for it.
                future.exception()
        self._on_lost(error)


def _spawn(scheme: str, module: str, worker: socket.socket, staging: int, *, receives: bool) -> subprocess.Popen[bytes]:
    role = "receive" if receives else "send"
    words = (scheme, module, role, str(worker.fileno()), str(staging))
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    for name, value in tuning.settings(environment).items():
        environment[f"UCX_{name}"] = value
    environment.setdefault("UCX_LOG_LEVEL", tuning.PROCESS_SETTINGS["LOG_LEVEL"])
    # It warns of settings that its release does not have.
    environment.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    environment.setdefault("NIXL_LOG_LEVEL", "ERROR")
    return subprocess.Popen(  # noqa: S603 -- our own module
        [sys.executable, "-m", "kv_transfer.carried.child", *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(worker.fileno(), staging),
        # What interrupts the worker is the worker's business; it tells its carriers by hanging up.
        start_new_session=True,
    )
