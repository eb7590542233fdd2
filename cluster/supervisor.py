"""The actor that keeps a cluster's processes as they are wanted: Ray's hands for :mod:`cluster.supervision`.

Life cycle: placed while the cluster comes up, and idle; :meth:`Supervisor.begin` once it is up. From then on a thread
of its own looks at every process several times a second. What it decides on it first writes to Ray's key-value store,
so one that Ray has restarted finds the record there, looks which processes live, and goes on. No token waits for it:
a cluster whose supervisor is dead serves, and only heals again when that is back.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from cluster.actors import FATAL_EXIT_STATUS, last_lines
from cluster.autoscale.autoscaler import Autoscaler, withdraw
from cluster.autoscale.report import AutoscaleReport
from cluster.config import ClusterConfig
from cluster.crew import Crew
from cluster.member import MemberRecord
from cluster.plan import ActorOrder, router_order, worker_order
from cluster.port import port_of
from cluster.scale_section import ScaleSection
from cluster.supervision import ClusterRecord, Create, Drain, Instruction, Kill, Save, Supervision, Switch
from protocol.error_info import ErrorInfo
from protocol.errors import ClusterError, KVFerryError

T = TypeVar("T")

SUPERVISOR_NAME = "supervisor"
LOOK_SECONDS = 0.2
"""Between two looks at the processes."""
MAX_CALLS = 8
STORE_NAMESPACE = b"kvferry"
CALLER_SECONDS = 10.0


class SupervisorOrder(msgspec.Struct, frozen=True, kw_only=True):
    """All that the supervisor is told; Ray keeps it and hands it to each life.

    Attributes:
        name: of the cluster.
        config: that the cluster came up with.
        port: that clients connect to.
        routers: hub endpoint of every router, also of one that is not there: those of the names "router-0", ...
        secret: what every process of the cluster must know to be spoken with.
    """

    name: str
    config: ClusterConfig
    port: int
    routers: tuple[str, ...]
    secret: str

    def __repr__(self) -> str:
        # Whatever is logged or raised with an order in it must not tell the secret.
        return f"SupervisorOrder(name={self.name!r})"

    def order(self, member: MemberRecord, config: ClusterConfig, predecessor: str = "") -> ActorOrder:
        """What a new life of ``member`` is told; ``predecessor`` is the router that may have the port."""
        if member.role == "router":
            hub_port = port_of(self.routers[member.index % len(self.routers)])
            named = {"name": member.name, "predecessor": predecessor}
            order = router_order(config, self.port, hub_port, self.secret, **named)
        else:
            order = worker_order(config, member.name, member.role, self.routers, self.secret)
        return msgspec.structs.replace(order, incarnation=member.incarnation, restarted=member.lives > 1)


class MemberReport(msgspec.Struct, frozen=True, kw_only=True):
    """How one member is.

    Attributes:
        name, role: of the member.
        state: "placing", "starting", "ready", "switching", "draining", "failed" or "restarting".
        stage, fraction: how far it has come up.
        error: why it failed last, or "".
        incarnation: of its present life.
        outdated: whether it runs an earlier configuration, and is to be replaced.
        fixed: whether it is of a release that cannot be replaced by a restart.
    """

    name: str
    role: str
    state: str
    stage: str = ""
    fraction: float = 0.0
    error: str = ""
    incarnation: int = 0
    outdated: bool = False
    fixed: bool = False


class SupervisorReport(msgspec.Struct, frozen=True, kw_only=True):
    """How the cluster is, as the supervisor sees it.

    Attributes:
        begun: whether it keeps the cluster already.
        settled: whether everything is as wanted.
        wanted: how many members of each role.
        members: every name in use, the router first.
        pid: of the supervisor.
    """

    begun: bool
    settled: bool = False
    wanted: dict[str, int] = {}
    members: tuple[MemberReport, ...] = ()
    pid: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a command gives: an error, or none; and the configuration, or the autoscaler's report, where asked for."""

    error: ErrorInfo | None = None
    config: ClusterConfig | None = None
    autoscale: AutoscaleReport | None = None


class Supervisor:
    """See the module. Ray calls the methods, each in a thread of its pool; answers are JSON."""

    def __init__(self, order: bytes) -> None:
        import ray
        from ray.experimental import internal_kv

        self._ray, self._store = ray, internal_kv
        self._order = msgspec.json.decode(order, type=SupervisorOrder)
        self._commands: queue.Queue[Callable[[], None]] = queue.Queue()
        self._supervision: Supervision | None = None
        self._crew = Crew(ray)
        self._autoscaler = Autoscaler(ray)
        self._begun = threading.Lock()
        saved = saved_record(self._order.name)
        if saved is not None:
            self._begin(saved)

    def begin(self) -> None:
        """The cluster is up: keep it so. A second call does nothing."""
        with self._begun:
            if self._supervision is None:
                self._begin(ClusterRecord.first(self._order.config))

    def report(self) -> bytes:
        """A :class:`SupervisorReport` as JSON."""
        if self._supervision is None:
            return msgspec.json.encode(SupervisorReport(begun=False, pid=os.getpid()))
        return msgspec.json.encode(self._in_turn(self._report))

    def config(self) -> bytes:
        """An :class:`Answer` with the configuration of the lives that begin from now on."""
        return self._answer(lambda supervision: supervision.record.config)

    def scale(self, wanted: Mapping[str, int]) -> bytes:
        """Have so many members of these roles; gives an :class:`Answer`."""
        return self._answer(lambda supervision: supervision.scale(wanted))

    def drain(self, name: str, timeout: float | None) -> bytes:
        """Let a worker leave for good; None for ``timeout`` takes the cluster's own."""
        return self._answer(lambda supervision: supervision.drain(name, _limit(supervision, timeout)))

    def switch(self, name: str, role: str, timeout: float | None) -> bytes:
        """Let a worker take the other role in its process; ``timeout`` as for :meth:`drain`."""
        return self._answer(lambda supervision: supervision.switch(name, role, _limit(supervision, timeout)))

    def restart(self, config: bytes) -> bytes:
        """Replace every process by one of this configuration, one by one; "null" for the one there is."""
        given = msgspec.json.decode(config, type=ClusterConfig | None)

        def replace(supervision: Supervision) -> None:
            supervision.restart(given or supervision.record.config, self._fixed(supervision))

        return self._answer(replace)

    def _fixed(self, supervision: Supervision) -> list[str]:
        """Routers of a release that could not share a port."""
        return [name for name in _routers(supervision) if not self._crew.can(name, "hand_over")]

    def rescale(self, scale: bytes) -> bytes:
        """Have workers come and go by another ``scale`` section; gives an :class:`Answer`."""
        given = msgspec.json.decode(scale, type=ScaleSection)
        return self._answer(lambda supervision: supervision.rescale(given))

    def autoscale(self) -> bytes:
        """An :class:`Answer` with how the autoscaler is."""

        def look(supervision: Supervision) -> AutoscaleReport:
            return self._autoscaler.report(supervision.record.config, time.monotonic())

        return self._answer(look)

    def log(self, lines: int) -> bytes:
        """The last lines that this process has written to its error output."""
        return last_lines(lines)

    def _answer(self, work: Callable[[Supervision], ClusterConfig | AutoscaleReport | None]) -> bytes:
        supervision = self._supervision
        try:
            if supervision is None:
                raise ClusterError("the cluster is still coming up")
            found = self._in_turn(lambda: work(supervision))
            answer = Answer(autoscale=found) if isinstance(found, AutoscaleReport) else Answer(config=found)
        except KVFerryError as error:
            answer = Answer(error=ErrorInfo.of(error))
        return msgspec.json.encode(answer)

    def _in_turn(self, work: Callable[[], T]) -> T:
        """The supervision belongs to its thread; whoever wants something of it waits until it has a moment."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(work())
            except Exception as error:
                answer.set_exception(error)

        self._commands.put(run)
        return answer.result(CALLER_SECONDS)

    # --- in the thread --------------------------------------------------------------------------------------------

    def _begin(self, record: ClusterRecord) -> None:
        self._supervision = Supervision(record, time.monotonic())
        threading.Thread(target=self._guarded, name="supervision", daemon=True).start()

    def _guarded(self) -> None:
        try:
            while True:
                self._turn()
        except BaseException:
            # Ray makes a new one, which goes on from the record.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(FATAL_EXIT_STATUS)

    def _turn(self) -> None:
        assert self._supervision is not None
        for name, sight, error in self._crew.look([member.record for member in self._supervision.members]):
            self._supervision.observed(name, sight, time.monotonic(), error)
        for instruction in self._supervision.tick(time.monotonic()):
            self._carry_out(instruction)
        self._autoscaler.turn(self._supervision, time.monotonic())
        next_look = time.monotonic() + LOOK_SECONDS
        while (left := next_look - time.monotonic()) > 0:
            try:
                self._commands.get(timeout=left)()
            except queue.Empty:
                break

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Save(record):
                key, value = store_key(self._order.name), msgspec.json.encode(record)
                self._store._internal_kv_put(key, value, True, namespace=STORE_NAMESPACE)
            case Create(member):
                assert self._supervision is not None
                others = (name for name in _routers(self._supervision) if name != member.name)
                order = self._order.order(member, self._supervision.record.config, next(others, ""))
                self._crew.create(order, self._supervision.fellows(member.name))
            case Drain(name, timeout):
                self._crew.drain(name, timeout)
            case Switch(member):
                assert self._supervision is not None
                order = self._order.order(member, self._supervision.record.config)
                self._crew.switch(order, member.drain_timeout)
            case Kill(name):
                self._crew.kill(name)

    def _report(self) -> SupervisorReport:
        assert self._supervision is not None
        record = self._supervision.record
        members = []
        for member in self._supervision.members:
            status = self._crew.statuses.get(member.record.name)
            state = member.state.value if member.record.leaving else member.seen.value
            words = {"absent": "restarting", "former": "switching"}
            words |= dict.fromkeys(("leaving", "missing", "gone"), "draining")
            members.append(
                MemberReport(
                    name=member.record.name,
                    role=member.record.role,
                    state=words.get(state, state),
                    stage="" if status is None else status.stage,
                    fraction=0.0 if status is None else status.fraction,
                    error=member.error,
                    incarnation=member.record.incarnation,
                    outdated=member.record.revision < record.revision and not member.record.fixed,
                    fixed=member.record.fixed,
                )
            )
        return SupervisorReport(
            begun=True,
            settled=self._supervision.settled,
            wanted={str(role): count for role, count in record.wanted.items()},
            members=tuple(members),
            pid=os.getpid(),
        )


def _routers(supervision: Supervision) -> list[str]:
    """Names of all routers, also of one that leaves."""
    return [member.record.name for member in supervision.members if member.record.role == "router"]


def _limit(supervision: Supervision, timeout: float | None) -> float:
    return supervision.record.config.scale.drain_timeout if timeout is None else timeout


def store_key(cluster: str) -> bytes:
    """Where the record of a cluster is kept in Ray's key-value store."""
    return f"supervisor/{cluster}".encode()


def saved_record(cluster: str) -> ClusterRecord | None:
    """What a supervisor has kept of a cluster; None if none has. The calling process is connected to Ray."""
    from ray.experimental import internal_kv

    saved = internal_kv._internal_kv_get(store_key(cluster), namespace=STORE_NAMESPACE)
    return None if saved is None else msgspec.json.decode(saved, type=ClusterRecord)


def create_supervisor(ray: Any, order: SupervisorOrder) -> Any:
    """Place the supervisor, beside the router, and have Ray restart it whenever it dies."""
    here = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(Supervisor)
        .options(
            name=SUPERVISOR_NAME,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=MAX_CALLS,
            scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False),
        )
        .remote(msgspec.json.encode(order))
    )


def remove_record(cluster: str) -> None:
    """Forget the record of a cluster that is down; the calling process is connected to its Ray cluster."""
    from ray.experimental import internal_kv

    saved = saved_record(cluster)
    if saved is not None and saved.config.scale.auto.enabled:
        withdraw(saved.config)
    internal_kv._internal_kv_del(store_key(cluster), namespace=STORE_NAMESPACE)
