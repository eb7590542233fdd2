"""How a router takes the place of another one while that serves: the port is shared once the new one knows the workers.

Life cycle of the two: the new router's process begins with :attr:`cluster.plan.ActorOrder.predecessor`, binds a hub of
its own, to which every worker is connecting all the time, and waits until it has heard those that the other one serves
with. Then the other's listening socket is passed to it, and both take connections, until the supervisor, which sees the
new one ready, lets the other leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import TYPE_CHECKING, Any

import msgspec

from cluster.hosting import StartProgress
from cluster.listener import offer, take

if TYPE_CHECKING:
    from router.server import RouterServer
    from router.service import Service

POLL_SECONDS = 0.2
CALL_SECONDS = 10.0
PATIENCE_SECONDS = 20.0
"""For workers that the other one serves with; after it some that serve will do."""


class RouterService:
    """Gives a router the face of a :class:`cluster.hosting.Service`.

    Attributes:
        server: the router.
    """

    def __init__(self, server: RouterServer) -> None:
        self.server = server
        self._drained = asyncio.Event()
        self._leaving: asyncio.Task[None] | None = None

    async def start(self, progress: StartProgress | None = None) -> None:
        """Have both ports and serve."""
        if progress is not None:
            progress("ports", 0.0)
        await self.server.start()

    async def stop(self) -> None:
        """Stop serving."""
        if self._leaving is not None:
            self._leaving.cancel()
            await asyncio.wait([self._leaving])
        await self.server.stop()

    async def wait(self) -> None:
        """Return when stopped, or to be; raise what ended it before that."""
        ends = [asyncio.create_task(each) for each in (self.server.wait(), self._drained.wait())]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in ends:
                each.cancel()
            await asyncio.wait(ends)
        for each in done:
            await each

    def drain(self, timeout: float) -> None:
        """End once clients have left, within ``timeout`` seconds; then answers have the router's ``stop_grace``."""
        if self._leaving is None:
            self._leaving = asyncio.get_running_loop().create_task(self._leave(timeout))

    def hand_over(self) -> str:
        """Where another router may take the listening socket, within some seconds; "" where there is none."""
        listener = self.server.share()
        return "" if listener is None else offer(listener)

    async def _leave(self, timeout: float) -> None:  # noqa: ASYNC109  told to the server
        await self.server.leave(timeout)
        self._drained.set()


class Succession:
    """Brings a new router what it inherits; an ``router.server.Inherit``.

    Args:
        ray: connected to the cluster.
        predecessor: name of the router that has the port.
    """

    def __init__(self, ray: Any, predecessor: str) -> None:
        self._ray, self._predecessor = ray, predecessor

    async def __call__(self, service: Service) -> socket.socket | None:
        """The socket that the other one listens at; None where it is gone, or on its way."""
        patient_until = time.monotonic() + PATIENCE_SECONDS
        while True:
            told = await self._asked("view")
            if told is None:
                return None
            here = _live(service.cluster())
            wanted = _live(msgspec.json.decode(told)["cluster"])
            if wanted <= here or (time.monotonic() > patient_until and service.health().ready):
                break
            await asyncio.sleep(POLL_SECONDS)
        told = await self._asked("hand_over")
        if not told:
            return None
        with contextlib.suppress(OSError):
            return await asyncio.to_thread(take, told.decode())
        return None

    async def _asked(self, method: str) -> bytes | None:
        return await asyncio.to_thread(self._ask, method)

    def _ask(self, method: str) -> bytes | None:
        try:
            asked = getattr(self._ray.get_actor(self._predecessor), method).remote()
            answer: bytes = self._ray.get(asked, timeout=CALL_SECONDS)
        except (ValueError, self._ray.exceptions.RayError):
            return None
        return answer


def _live(overview: dict[str, Any]) -> set[tuple[str, int]]:
    """Workers that take new requests."""
    return {(worker["name"], worker["incarnation"]) for worker in overview["workers"] if worker["state"] == "live"}
