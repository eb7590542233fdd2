"""The Ray actors of a cluster: one process each, thin shells around a hosted service.

Life cycle: Ray makes the process and the actor; its constructor starts the service, so that one that Ray restarts comes
up with nobody calling. When the service ends by itself, the process ends with it and Ray makes a new one. Only control
rides on these calls, as JSON bytes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cluster.hosting import Host, Service, StartProgress
from cluster.phases import Phase, process_age
from cluster.plan import ActorOrder, decode_config, prefill_config, router_config

if TYPE_CHECKING:
    from router.server import RouterServer

MAX_CALLS = 16
"""Calls of one actor at a time."""
STOP_TIMEOUT_SECONDS = 10.0
FATAL_EXIT_STATUS = 70


class ActorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How one actor is.

    Attributes:
        name, role: of its order.
        pid: of its process.
        host: address of its machine.
        state: a value of :class:`cluster.hosting.HostState`.
        stage, fraction: how far it has come up.
        error: why it failed, or "".
        restarted: whether this is a later life of the actor.
        phases: how long each phase of its start took, from the start of its process; those that are over.
    """

    name: str
    role: str
    pid: int
    host: str
    state: str
    stage: str = ""
    fraction: float = 0.0
    error: str = ""
    restarted: bool = False
    phases: tuple[Phase, ...] = ()


class ServiceActor:
    """Runs the service that its order names. Ray calls the methods; each role has a class of its own below."""

    def __init__(self, order: bytes) -> None:
        import ray

        self._process = Phase(name="process", seconds=process_age())
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._order = msgspec.json.decode(order, type=ActorOrder)
        # Here, and not in a runtime environment of Ray's: an agent would have to come up first and make that.
        os.environ.update(self._order.environment())
        self._address = ray.util.get_node_ip_address()
        context = ray.get_runtime_context()
        self._restarted = bool(context.was_current_actor_reconstructed)
        self._host = Host(self._order.name, self._make, retry=self._restarted, on_fatal=_end_process)
        self._host.begin()

    async def status(self) -> bytes:
        """An :class:`ActorStatus` as JSON."""
        return msgspec.json.encode(
            ActorStatus(
                name=self._order.name,
                role=self._order.role,
                pid=os.getpid(),
                host=self._address,
                state=self._host.state.value,
                stage=self._host.stage,
                fraction=self._host.fraction,
                error=self._host.error,
                restarted=self._restarted,
                phases=(self._process, *self._host.phases),
            )
        )

    async def ready(self) -> bool:
        """Whether the service serves."""
        return self._host.state.value == "ready"

    async def load(self) -> bytes:
        """The worker's :class:`protocol.messages.WorkerLoad` as JSON; "null" for a router, or while it is not ready."""
        if self._order.role == "router" or not await self.ready():
            return b"null"
        return await self._host.call(lambda worker: msgspec.json.encode(worker.load()))

    async def stop(self) -> None:
        """Stop the service and wait for it, within a bound."""
        await asyncio.get_running_loop().run_in_executor(None, self._host.stop, STOP_TIMEOUT_SECONDS)

    async def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def _make(self) -> Service:
        from cluster.model_store import resolve_model

        # Our own node serves this machine alone; on a joined one the others come in over the node's address.
        host = "127.0.0.1" if self._order.config.ray.address is None else self._address
        return self.build(self._order, resolve_model(self._order.config.model), host)

    def build(self, order: ActorOrder, model: Path, host: str) -> Service:
        """The service of ``order``."""
        raise NotImplementedError


class PrefillActor(ServiceActor):
    """A prefill worker's process."""

    def build(self, order: ActorOrder, model: Path, host: str) -> Service:
        """The worker."""
        from prefill_worker.worker import PrefillWorker

        return PrefillWorker(prefill_config(order, model, host))


class DecodeActor(ServiceActor):
    """A decode worker's process."""

    def build(self, order: ActorOrder, model: Path, host: str) -> Service:
        """The worker."""
        from decode_worker.worker import DecodeWorker

        return DecodeWorker(decode_config(order, model, host))


class RouterActor(ServiceActor):
    """The router's process."""

    def build(self, order: ActorOrder, model: Path, host: str) -> Service:
        """The router, with the face of a service."""
        from router.server import RouterServer

        return RouterService(RouterServer(router_config(order, model, host)))


class RouterService:
    """Gives a router the face of a :class:`cluster.hosting.Service`."""

    def __init__(self, server: RouterServer) -> None:
        self._server = server

    async def start(self, progress: StartProgress | None = None) -> None:
        """Bind both ports and serve."""
        if progress is not None:
            progress("binding", 0.0)
        await self._server.start()

    async def stop(self) -> None:
        """Stop serving."""
        await self._server.stop()

    async def wait(self) -> None:
        """Return when stopped; raise what ended it before that."""
        await self._server.wait()


_CLASSES: dict[str, type[ServiceActor]] = {"router": RouterActor, "prefill": PrefillActor, "decode": DecodeActor}


def create_actor(ray: Any, order: ActorOrder) -> Any:
    """Place a detached actor for ``order``; it starts by itself.

    A router stays on this machine: its workers find a restarted one where the first one was.
    """
    options: dict[str, Any] = {
        "name": order.name,
        "lifetime": "detached",
        "num_cpus": order.cpus,
        "num_gpus": order.gpus,
        "max_restarts": -1,
        "max_concurrency": MAX_CALLS,
    }
    if order.role == "router":
        here = ray.get_runtime_context().get_node_id()
        options["scheduling_strategy"] = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
    return ray.remote(_CLASSES[order.role]).options(**options).remote(msgspec.json.encode(order))


def _end_process(error: BaseException) -> None:
    # A clean exit would tell Ray that the actor is done; this status makes it start a new one.
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(FATAL_EXIT_STATUS)
