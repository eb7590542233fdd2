"""How a cluster and its processes are, asked from the processes themselves."""

from __future__ import annotations

from typing import Any

import msgspec

from cluster.actors import ActorLoad, ActorStatus
from cluster.phases import Phase
from cluster.placement import machines_of, unused
from cluster.ray_node import connect, node_alive
from cluster.state import ClusterState, StateStore
from cluster.supervisor import SUPERVISOR_NAME, MemberReport, SupervisorReport

CALL_SECONDS = 3.0


class ActorReport(msgspec.Struct, frozen=True, kw_only=True):
    """One actor: how it is, and, of a worker that is ready, what it does."""

    status: ActorStatus
    load: ActorLoad | None = None


class ClusterReport(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster.

    Attributes:
        name, url, model, transport: of the cluster; the transport as its file has it.
        state: "ready" when every actor and the supervisor is, "starting", "unfinished" when the command that brought it
            up is gone before it was done, "degraded", or "dead" when its Ray node is gone, or was started anew.
        actors: router first.
        wanted: how many processes of each role there shall be, as the supervisor has it; empty where that is silent.
        supervised: whether the supervisor answers, which brings back what dies.
        phases: how long each phase of its coming up took, from the command to ready.
        unused: addresses of machines of a Ray cluster that was joined on which nothing of this one runs.
        hint: what to do about a cluster that will not come back by itself; "" for any other.
    """

    name: str
    url: str
    model: str
    transport: str
    state: str
    actors: tuple[ActorReport, ...] = ()
    wanted: dict[str, int] = {}
    supervised: bool = False
    phases: tuple[Phase, ...] = ()
    unused: tuple[str, ...] = ()
    hint: str = ""

    @property
    def transports(self) -> tuple[str, ...]:
        """What KV has gone by, since the prefill workers' present incarnations began."""
        return tuple(
            sorted({scheme for each in self.actors if each.load is not None for scheme in each.load.transports})
        )


def cluster_report(name: str, *, store: StateStore | None = None) -> ClusterReport:
    """Ask every actor of a cluster how it is; one that does not answer in time is reported as such.

    Raises:
        ClusterNotFound: no such cluster.
        ClusterError: its Ray cluster cannot be reached.
    """
    state = (StateStore() if store is None else store).load(name)
    unfinished = not state.ready and not state.starter.alive()
    if state.node is None or not state.node.address:
        return _report(state, "dead" if unfinished else "starting", ())
    if not node_alive(state.node):
        return _report(state, "dead", ())
    with connect(state.node, state.name) as ray:
        # What died comes back as long as one is left to see to it; of a Ray that was started anew nothing does.
        if state.ready and not ray.util.list_named_actors():
            return _report(state, "dead", ())
        supervisor = _supervisor(ray)
        members = {member.name: member for member in supervisor.members} if supervisor.begun else {}
        names = tuple(members) or state.actors
        actors = tuple(_explained(actor, members.get(actor.status.name)) for actor in _ask(ray, names))
        free = () if state.node.owned else unused(machines_of(ray), (actor.status.node for actor in actors))
    well = bool(actors) and all(actor.status.state == "ready" for actor in actors)
    word = "unfinished" if unfinished else "starting"
    if state.ready:
        word = "ready" if well and supervisor.begun else "degraded"
    report = _report(state, word, actors)
    return msgspec.structs.replace(report, wanted=supervisor.wanted, supervised=supervisor.begun, unused=free)


def _supervisor(ray: Any) -> SupervisorReport:
    try:
        answer = ray.get(ray.get_actor(SUPERVISOR_NAME).report.remote(), timeout=CALL_SECONDS)
    except (ValueError, ray.exceptions.RayError):
        return SupervisorReport(begun=False)
    return msgspec.json.decode(answer, type=SupervisorReport)


def _explained(actor: ActorReport, member: MemberReport | None) -> ActorReport:
    """What the supervisor knows of a process that says nothing itself."""
    if member is None or actor.status.state not in ("gone", "restarting"):
        return actor
    status = msgspec.structs.replace(actor.status, role=member.role, state=member.state, error=member.error)
    return msgspec.structs.replace(actor, status=status)


def _ask(ray: Any, names: tuple[str, ...]) -> tuple[ActorReport, ...]:
    calls: dict[str, tuple[Any, Any] | None] = {}
    for name in names:
        try:
            handle = ray.get_actor(name)
        except ValueError:
            calls[name] = None
            continue
        calls[name] = (handle.status.remote(), handle.load.remote())
    waited = [call for pair in calls.values() if pair is not None for call in pair]
    if waited:
        ray.wait(waited, num_returns=len(waited), timeout=CALL_SECONDS)
    return tuple(_answer(ray, name, pair) for name, pair in calls.items())


def _answer(ray: Any, name: str, pair: tuple[Any, Any] | None) -> ActorReport:
    role = name.rpartition("-")[0]
    missing = ActorStatus(name=name, role=role, pid=0, host="", state="gone")
    if pair is None:
        return ActorReport(status=missing)
    try:
        status = msgspec.json.decode(ray.get(pair[0], timeout=0), type=ActorStatus)
    except ray.exceptions.RayError as error:
        silent = isinstance(error, ray.exceptions.GetTimeoutError)
        return ActorReport(
            status=msgspec.structs.replace(missing, state="no answer" if silent else "restarting", error=str(error))
        )
    try:
        load = msgspec.json.decode(ray.get(pair[1], timeout=0), type=ActorLoad | None)
    except ray.exceptions.RayError:
        load = None
    return ActorReport(status=status, load=load)


def _report(state: ClusterState, word: str, actors: tuple[ActorReport, ...]) -> ClusterReport:
    hints = {"unfinished": "its 'kvferry up' ended before it was done", "dead": "nothing of it is left on Ray"}
    return ClusterReport(
        name=state.name,
        url=state.url,
        model=state.model,
        transport=state.transport,
        state=word,
        actors=actors,
        phases=state.phases,
        hint=f"{hints[word]}; clear it with: kvferry down {state.name}" if word in hints else "",
    )
