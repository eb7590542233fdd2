"""The Ray actors of a cluster: one process each, thin shells around a hosted service.

Life cycle: Ray makes the process and the actor; its constructor starts the service, so that it comes up with nobody
calling. An actor has one life: when the service fails, or has drained, the process ends with it, and the supervisor
makes a new actor of the name where there shall be one. A worker may be told to take the other role: then it drains, and
a service of that role comes up in the same process, over the same engine. SIGTERM drains. Only control rides on these
calls, as JSON.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from cluster.collector import hold, keep
from cluster.hosting import Host, HostState, Service
from cluster.log_format import set_up_logging
from cluster.phases import Phase, process_age
from cluster.plan import ActorOrder, decode_config, prefill_config, router_config
from protocol.messages import WorkerLoad

if TYPE_CHECKING:
    from decode_worker.worker import DecodeWorker
    from engine.engine import Engine
    from prefill_worker.worker import PrefillWorker

MAX_CALLS = 16
"""Calls of one actor at a time."""
STOP_TIMEOUT_SECONDS = 10.0
FATAL_EXIT_STATUS = 70
MAX_LOG_BYTES = 1 << 20
"""Of a log, in one answer."""


class ActorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How one actor is.

    Attributes:
        name, role: of its order.
        pid: of its process.
        host: address of its machine.
        node: Ray's id of that.
        state: a value of :class:`cluster.hosting.HostState`.
        stage, fraction: how far it has come up.
        error: why it failed, or "".
        incarnation: of this life of the name; the first one's is 1. A worker that takes another role begins a new one.
        draining: whether it takes no new work.
        restarted: whether a process that was made for the same member has died.
        phases: how long each phase of its start took, from the start of its process, or from when it had drained for
            another role; those that are over.
    """

    name: str
    role: str
    pid: int
    host: str
    state: str
    stage: str = ""
    fraction: float = 0.0
    error: str = ""
    incarnation: int = 0
    draining: bool = False
    restarted: bool = False
    phases: tuple[Phase, ...] = ()
    node: str = ""


class ActorLoad(WorkerLoad, frozen=True, kw_only=True):
    """What a worker is doing, and what its handoffs were.

    Attributes:
        transports: URI schemes by which a prefill worker has shipped since its incarnation began.
    """

    transports: tuple[str, ...] = ()

    @classmethod
    def of(cls, worker: PrefillWorker | DecodeWorker) -> ActorLoad:
        """As it is now."""
        used = tuple(sorted(scheme for scheme, path in worker.transfer().paths.items() if path.ship_bytes.count))
        return cls(**msgspec.structs.asdict(worker.load()), transports=used)


class ServiceActor:
    """Runs the service that its order names. Ray calls the methods; each role has a class of its own below."""

    _drained: bool = False
    _host: Host | None = None

    def __new__(cls, *_: object) -> Self:
        """Made on the process's main thread, the only one that may take a signal; ``__init__`` is called on another."""
        import ray

        actor = super().__new__(cls)
        # Whoever places an actor makes an object too, of a class that Ray mixes from this one and its own.
        if not issubclass(cls, ray.actor.ActorClass):
            signal.signal(signal.SIGTERM, lambda *_: actor.terminated())
        return actor

    def __init__(self, order: bytes) -> None:
        import ray

        self._before: tuple[Phase, ...] = (Phase(name="process", seconds=process_age()),)
        self._order = msgspec.json.decode(order, type=ActorOrder)
        logs = self._order.config.logging
        set_up_logging(self._order.name, logs.format, logs.level)
        self._address = ray.util.get_node_ip_address()
        self._node = ray.get_runtime_context().get_node_id()
        hold()
        self._host = Host(self._order.name, self._make, on_up=keep, on_fatal=_end_process, on_left=_leave)
        self._host.begin()

    async def status(self) -> bytes:
        """An :class:`ActorStatus` as JSON."""
        host = self._service_host
        return msgspec.json.encode(
            ActorStatus(
                name=self._order.name,
                role=self._order.role,
                pid=os.getpid(),
                host=self._address,
                state=host.state.value,
                stage=host.stage,
                fraction=host.fraction,
                error=host.error,
                incarnation=self._order.incarnation,
                draining=self._drained,
                restarted=self._order.restarted,
                phases=(*self._before, *host.phases),
                node=self._node,
            )
        )

    async def load(self) -> bytes:
        """The worker's :class:`ActorLoad` as JSON; "null" for a router, or while it is not ready."""
        if self._order.role == "router" or self._service_host.state is not HostState.READY:
            return b"null"
        return await self._service_host.call(lambda worker: msgspec.json.encode(ActorLoad.of(worker)))

    async def log(self, lines: int) -> bytes:
        """The last lines that this process has written to its error output."""
        return await asyncio.to_thread(last_lines, lines)

    async def stop(self) -> None:
        """Stop the service and wait for it, within a bound."""
        await asyncio.get_running_loop().run_in_executor(None, self._service_host.stop, STOP_TIMEOUT_SECONDS)

    async def drain(self, timeout: float) -> None:  # noqa: ASYNC109  told to the worker, not waited for here
        """Take no new work, finish what there is within ``timeout`` seconds, give back the rest, and end."""
        self._drained = True
        self._service_host.drain(timeout)

    def terminated(self) -> None:
        """The process was sent SIGTERM."""
        if self._host is None:
            _leave()
        else:
            self._drained = True
            self._host.drain(self.notice)

    @property
    def notice(self) -> float:
        """Seconds to finish what there is after SIGTERM."""
        return self._order.config.scale.drain_timeout

    @property
    def _service_host(self) -> Host:
        assert self._host is not None, "made by the constructor"
        return self._host

    def _make(self) -> Service:
        from cluster.model_store import resolve_model

        # Our own node serves this machine alone; on a joined one the others come in over the node's address.
        host = "127.0.0.1" if self._order.config.ray.address is None else self._address
        return self.build(self._order, resolve_model(self._order.config.model), host)

    def build(self, order: ActorOrder, model: Path, host: str) -> Service:
        """The service of ``order``."""
        raise NotImplementedError


class WorkerActor(ServiceActor):
    """A worker's process: of one role, and then maybe of the other, over an engine that outlives both."""

    _engine: Engine | None = None
    _next: ActorOrder | None = None

    async def switch(self, order: bytes, timeout: float) -> None:  # noqa: ASYNC109  told to the worker
        """Finish what there is within ``timeout`` seconds, give back the rest, and go on as ``order`` says."""
        given = msgspec.json.decode(order, type=ActorOrder)
        if given.incarnation <= (self._next or self._order).incarnation:
            return  # it came twice
        self._drained, self._next = True, given
        self._service_host.switch(self._become, timeout)

    def _become(self) -> Service:
        assert self._next is not None, "set before the host is told"
        self._order, self._next = self._next, None
        self._drained, self._before = False, ()
        hold()
        return self._make()

    def build(self, order: ActorOrder, model: Path, host: str) -> Service:
        """The worker."""
        from engine.engine import Engine

        if self._engine is None:
            self._engine = Engine(lasting=True)
        if order.role == "prefill":
            from prefill_worker.worker import PrefillWorker

            return PrefillWorker(prefill_config(order, model, host), self._engine)
        from decode_worker.worker import DecodeWorker

        return DecodeWorker(decode_config(order, model, host), self._engine)


class RouterActor(ServiceActor):
    """The router's process."""

    def build(self, order: ActorOrder, model: Path, host: str) -> Service:
        """The router, with the face of a service."""
        import ray

        from cluster.succession import RouterService, Succession
        from router.server import RouterServer

        inherit = Succession(ray, order.predecessor) if order.predecessor else None
        return RouterService(RouterServer(router_config(order, model, host), inherit))

    @property
    def notice(self) -> float:
        """None: until this one is gone nobody answers at its port, for whoever ended it has made no other one."""
        return 0.0

    async def hand_over(self) -> bytes:
        """Where another router may take the listening socket of this one, within some seconds; b"" when it has none."""
        told = await self._service_host.call(lambda router: router.hand_over())
        return str(told).encode()

    async def view(self) -> bytes:
        """A :class:`cluster.autoscale.router_view.RouterView` as JSON: what the autoscaler goes by."""
        host = self._service_host
        server = await host.call(lambda router: router.server)
        overview = await host.call(lambda router: router.server.service.cluster())
        # As for a scrape: in a thread, for the router's loop has streams to serve.
        metrics = await asyncio.to_thread(server.service.metrics)
        return msgspec.json.encode({"cluster": overview, "metrics": metrics.decode()})


def create_actor(ray: Any, order: ActorOrder, node: str | None = None) -> Any:
    """Place a detached actor for ``order``; it starts by itself, and is not made again when it ends.

    A router stays on this machine: its workers find a restarted one where the first one was.

    Args:
        ray: connected to the cluster.
        order: what it is told.
        node: Ray's id of the machine that it shall go to, and fails with; None leaves it to Ray.
    """
    options: dict[str, Any] = {
        "name": order.name,
        "lifetime": "detached",
        "num_cpus": order.cpus,
        "num_gpus": order.gpus,
        "resources": order.resources,
        "max_restarts": 0,
        "max_concurrency": MAX_CALLS,
        "runtime_env": {"env_vars": order.environment()},
    }
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    if order.role == "router":
        options["scheduling_strategy"] = affinity(ray.get_runtime_context().get_node_id(), soft=False)
    elif node is not None:
        # Not soft: so Ray sends one that asks for nothing anywhere.
        options["scheduling_strategy"] = affinity(node, soft=False)
    elif order.spread:
        options["scheduling_strategy"] = "SPREAD"
    kind: type[ServiceActor] = RouterActor if order.role == "router" else WorkerActor
    return ray.remote(kind).options(**options).remote(msgspec.json.encode(order))


def _end_process(error: BaseException) -> None:
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(FATAL_EXIT_STATUS)


def _leave() -> None:
    os._exit(0)


def last_lines(lines: int) -> bytes:
    """The last lines that this process has written to its error output, which Ray has made a file."""
    file = Path("/proc/self/fd/2")
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - MAX_LOG_BYTES))
        return b"\n".join(stream.read().splitlines()[-lines:])
