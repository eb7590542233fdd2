"""Brings a cluster up, and down again.

Life cycle of a cluster: its name is claimed, its Ray node started (or a running Ray cluster joined), the router's actor
placed, then the workers' and the supervisor's, and it is up when the router says so; from then on the supervisor keeps
it so. Whatever fails on the way, nothing is left behind.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from cluster.actors import ActorStatus, create_actor
from cluster.autoscale.autoscaler import request, withdraw
from cluster.config import ClusterConfig
from cluster.member import is_member
from cluster.model_store import resolve_model
from cluster.ownership import check_ownership
from cluster.phases import PhaseClock, spelled
from cluster.placement import Resources, amounts, lacking, machines_of, spread_out
from cluster.plan import ROUTER_NAME, ActorOrder, check_orders, planned_orders, router_order, worker_orders
from cluster.port import bound_port, free_hub_port
from cluster.progress import Progress, Step, silent
from cluster.ray_node import connect, log_tail, node_alive, start_node, stop_node
from cluster.signals import uninterrupted
from cluster.state import ClusterState, NodeState, StateStore
from cluster.supervisor import SUPERVISOR_NAME, SupervisorOrder, SupervisorReport, create_supervisor, remove_record
from protocol.codec import SPOKEN
from protocol.errors import ClusterError, ClusterNotFound, StartFailed

POLL_SECONDS = 0.1
SECRET_BYTES = 32
STOP_SECONDS = 15.0
"""What an actor gets to stop in good order before it is killed."""


def up(
    config: ClusterConfig,
    progress: Progress = silent,
    *,
    store: StateStore | None = None,
    clock: PhaseClock | None = None,
) -> ClusterState:
    """Bring a cluster up and return once its router is ready.

    Args:
        config: the cluster.
        progress: told of each step.
        store: where the cluster is recorded; None takes the user's.
        clock: of what went before; None begins here.

    Raises:
        ClusterExists: one of that name is up.
        StartFailed: something was not ready within ``config.ray.start_timeout`` seconds, or failed; names it and why.
        ConfigError, ModelError, ClusterError: as they say. After any of them nothing is left running.
    """
    store = StateStore() if store is None else store
    clock = PhaseClock("checks", time.monotonic()) if clock is None else clock
    clock.enter("checks", time.monotonic())
    check_ownership()
    # What is wrong with the file is said first, also while another cluster has the name.
    check_orders(planned_orders(config), Path(config.model))
    model = resolve_model(config.model, lambda stage, done, total: progress(_model_step(stage, done, total)))
    _clear_remains(config.name, store)
    state = store.reserve(config.name)
    try:
        return _BringUp(config, progress, store, state, model, clock).run()
    except BaseException:
        with uninterrupted():
            progress(Step(actor="cluster", stage="giving up, bringing down what has started"))
            down(config.name, progress, store=store)
        raise


def down(name: str, progress: Progress = silent, *, store: StateStore | None = None, forget: bool = False) -> None:
    """Bring a cluster down: stop its actors in good order, then whatever is left of them and of its own Ray node.

    Args:
        name: of the cluster.
        progress: told of each step.
        store: where the cluster is recorded.
        forget: clear its record also where the Ray cluster that it joined cannot be reached; what is left there of it
            goes on.

    Raises:
        ClusterNotFound: no such cluster.
        ClusterError: a joined Ray cluster cannot be reached, or a process outlived being killed.
    """
    store = StateStore() if store is None else store
    state = store.load(name)
    node = state.node
    if node is not None:
        if (node.address or not node.owned) and state.actors and node_alive(node):
            try:
                _stop_actors(state, node, progress)
            except ClusterError as error:
                if not node.owned and not forget:
                    raise ClusterError(
                        f"{error.message}; when that Ray is gone for good: kvferry down {name} --forget"
                    ) from error
                if not node.owned:
                    progress(Step(actor="cluster", stage=f"forgotten, not stopped: {error.message}"))
        if node.owned:
            progress(Step(actor="ray", stage="stopping"))
        stop_node(node)
    store.remove(name)
    progress(Step(actor="cluster", stage="down", fraction=1.0))


class _BringUp:
    """One cluster on its way up; keeps its record current."""

    def __init__(
        self,
        config: ClusterConfig,
        progress: Progress,
        store: StateStore,
        state: ClusterState,
        model: Path,
        clock: PhaseClock,
    ) -> None:
        self._config, self._progress, self._store, self._state = config, progress, store, state
        self._model, self._clock = model, clock
        self._deadline = time.monotonic() + config.ray.start_timeout
        self._pids: dict[str, int] = {}
        self._wanted: dict[str, Resources] = {}

    def run(self) -> ClusterState:
        config = self._config
        # In the record before anybody has it: whatever joins later must know the same one.
        secret = secrets.token_hex(SECRET_BYTES)
        self._record(secret=secret)
        port, *hub_ports = _free_ports(config, self._store)
        router = router_order(config, port, hub_ports[0], secret)
        check_orders([router], self._model)
        self._clock.enter("Ray's node", time.monotonic())
        node = self._node()
        self._clock.enter("connection to it", time.monotonic())
        with connect(node, config.name) as ray:
            self._progress(Step(actor="ray", stage="ready", fraction=1.0))
            self._await_machines(ray)
            self._clock.enter("processes", time.monotonic())
            here = "127.0.0.1" if node.owned else ray.util.get_node_ip_address()
            scheme = "https" if config.router.tls_certificate else "http"
            hubs = tuple(f"tcp://{here}:{each}" for each in hub_ports)
            workers = worker_orders(config, hubs, secret)
            self._record(
                actors=tuple(order.name for order in (router, *workers)),
                url=f"{scheme}://{_reachable(config.router.host, here)}:{router.port}",
                hub=hubs[0],
                spare_hub=hubs[1],
                model=config.model_name,
                transport=config.transfer.transport,
                wire=SPOKEN,
            )
            # All at once: a worker knows where the router will be, and its connection waits for it.
            self._wanted = {order.name: order.reserved for order in (router, *workers)}
            nodes = {} if node.owned else spread_out(workers, machines_of(ray))
            handles = {order.name: self._place(ray, order, nodes.get(order.name)) for order in (router, *workers)}
            order = SupervisorOrder(
                name=config.name,
                config=config,
                port=router.port,
                routers=hubs,
                secret=secret,
            )
            # A cluster of this name that was not brought down in order would have left one.
            remove_record(config.name)
            supervisor = create_supervisor(ray, order)
            self._await(ray, handles, node)
            self._clock.enter("router", time.monotonic())
            self._await_router()
            self._clock.enter("supervisor", time.monotonic())
            self._hand_over(ray, supervisor)
        self._clock.end(time.monotonic())
        phases = self._clock.phases
        self._record(ready=True, phases=phases)
        self._progress(Step(actor="cluster", stage="ready", fraction=1.0, detail=spelled(phases)))
        return self._state

    def _node(self) -> NodeState:
        section = self._config.ray
        if section.address is not None:
            self._progress(Step(actor="ray", stage=f"connecting to {section.address}"))
            node = NodeState(address=section.address)
        else:
            self._progress(Step(actor="ray", stage="starting"))
            node = start_node(section, lambda begun: self._record(node=begun), timeout=self._left())
        self._record(node=node)
        return node

    def _await_machines(self, ray: Any) -> None:
        """Place nothing before there are the machines that it shall be placed on."""
        config = self._config
        if not lacking(config, machines_of(ray)):
            return
        self._clock.enter("machines", time.monotonic())
        # Where machines come when somebody wants them, nobody else does yet.
        request(config, {"prefill": config.prefill.replicas, "decode": config.decode.replicas})
        try:
            while awaited := lacking(config, machines_of(ray)):
                self._progress(Step(actor="ray", stage=f"waiting for {awaited}"))
                if time.monotonic() > self._deadline:
                    raise StartFailed(f"not there within {config.ray.start_timeout:g} s: {awaited}")
                time.sleep(POLL_SECONDS)
        finally:
            withdraw(config)

    def _no_room(self, placing: Iterable[str], ray: Any) -> str:
        # What wants nothing has room, and only takes its time.
        hungry = sorted(name for name in placing if any(self._wanted[name].values()))
        told = "".join(f"; {name} wants {amounts(self._wanted[name])}" for name in hungry)
        return told and f"{told}; Ray has left: {amounts(ray.available_resources())}"

    def _place(self, ray: Any, order: ActorOrder, node: str | None) -> Any:
        self._progress(Step(actor=order.name, stage="placing"))
        try:
            return create_actor(ray, order, node)
        except ValueError as error:  # Ray's word for a name that is taken
            raise StartFailed(f"cannot place {order.name}: {error}") from error

    def _await(self, ray: Any, handles: dict[str, Any], node: NodeState) -> None:
        last = dict.fromkeys(handles, "placing")
        calls = {handle.status.remote(): name for name, handle in handles.items()}
        while calls:
            done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=POLL_SECONDS)
            for call in done:
                name = calls.pop(call)
                status = self._status(ray, call, name, node)
                last[name] = f"{status.stage} {status.fraction:.0%}" if status.fraction else status.stage
                detail = spelled(status.phases) if status.state == "ready" else ""
                self._progress(Step(actor=name, stage=status.stage, fraction=status.fraction, detail=detail))
                if status.state != "ready":
                    calls[handles[name].status.remote()] = name
            if calls and time.monotonic() > self._deadline:
                late = ", ".join(f"{name} ({last[name]})" for name in sorted(calls.values()))
                hint = self._no_room({name for name in calls.values() if last[name] == "placing"}, ray)
                # What has no process yet would not hear that it is to stop in good order.
                _kill(ray, {name: handles[name] for name in {*calls.values()} - {*self._pids}}, self._state)
                raise StartFailed(f"not ready within {self._config.ray.start_timeout:g} s: {late}{hint}")
            if calls:
                time.sleep(POLL_SECONDS)

    def _status(self, ray: Any, call: Any, name: str, node: NodeState) -> ActorStatus:
        try:
            status = msgspec.json.decode(ray.get(call), type=ActorStatus)
        except ray.exceptions.RayError as error:
            # While a cluster comes up, a death is a failure; nobody tries again.
            tail = log_tail(node, self._pids[name]) if name in self._pids else ""
            raise StartFailed(f"{name} died while starting: {tail or error}") from error
        self._pids[name] = status.pid
        if status.state == "failed":
            raise StartFailed(f"{name} failed to start: {status.error}")
        return status

    def _await_router(self) -> None:
        import httpx

        self._progress(Step(actor=ROUTER_NAME, stage="waiting for workers"))
        answer = "no answer"
        # Whoever answers is told nothing, so its certificate, which may be for other names, does not matter.
        with httpx.Client(trust_env=False, timeout=2.0, verify=False) as client:  # noqa: S501
            while time.monotonic() < self._deadline:
                try:
                    response = client.get(f"{self._state.url}/ready")
                except httpx.HTTPError as error:
                    answer = str(error)
                else:
                    if response.status_code == httpx.codes.OK:
                        return
                    answer = f"{response.status_code} {response.text[:500]}"
                time.sleep(POLL_SECONDS)
        raise StartFailed(f"{ROUTER_NAME} is not ready after {self._config.ray.start_timeout:g} s: {answer}")

    def _hand_over(self, ray: Any, supervisor: Any) -> None:
        self._progress(Step(actor=SUPERVISOR_NAME, stage="starting"))
        try:
            ray.get(supervisor.begin.remote(), timeout=self._left())
            msgspec.json.decode(ray.get(supervisor.report.remote(), timeout=self._left()), type=SupervisorReport)
        except ray.exceptions.RayError as error:
            raise StartFailed(f"{SUPERVISOR_NAME} did not start: {error}") from error
        self._progress(Step(actor=SUPERVISOR_NAME, stage="ready", fraction=1.0))

    def _record(self, **changes: Any) -> None:
        self._state = msgspec.structs.replace(self._state, **changes)
        self._store.save(self._state)

    def _left(self) -> float:
        return max(1.0, self._deadline - time.monotonic())


def _model_step(stage: str, done: int, total: int) -> Step:
    return Step(actor="model", stage=stage, fraction=done / total if total else 0.0)


def _clear_remains(name: str, store: StateStore) -> None:
    """Bring down what is left of a cluster that is not up any more."""
    try:
        state = store.load(name)
    except ClusterNotFound:
        return
    abandoned = not state.ready and not state.starter.alive()
    dead = state.node is not None and state.node.owned and not node_alive(state.node)
    if abandoned or dead:
        down(name, store=store)


def _stop_actors(state: ClusterState, node: NodeState, progress: Progress) -> None:
    with connect(node, state.name) as ray:
        # The supervisor first, and at once: what is stopped from here on shall not come back.
        supervisor = _find(ray, SUPERVISOR_NAME)
        if supervisor is not None:
            _kill(ray, {SUPERVISOR_NAME: supervisor}, state)
        remove_record(state.name)
        names = dict.fromkeys([*state.actors, *filter(is_member, ray.util.list_named_actors())])
        handles = {name: handle for name in names if (handle := _find(ray, name)) is not None}
        # The router first: with it gone no new request comes in.
        routers = [name for name in handles if name.startswith("router-")]
        for group in (routers, [name for name in handles if name not in routers]):
            asked = [handles[name].stop.remote() for name in group if name in handles]
            for name in group:
                progress(Step(actor=name, stage="stopping"))
            if asked:
                ray.wait(asked, num_returns=len(asked), timeout=STOP_SECONDS)
        _kill(ray, handles, state)


def _kill(ray: Any, handles: dict[str, Any], state: ClusterState) -> None:
    """Kill actors, and wait until Ray has forgotten their names."""
    for handle in handles.values():
        ray.kill(handle, no_restart=True)
    deadline = time.monotonic() + STOP_SECONDS
    while any(_find(ray, name) is not None for name in handles):
        if time.monotonic() > deadline:
            raise ClusterError(f"Ray still lists actors of cluster {state.name!r}")
        time.sleep(POLL_SECONDS)


def _find(ray: Any, name: str) -> Any:
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def _free_ports(config: ClusterConfig, store: StateStore) -> tuple[int, int, int]:
    """HTTP port, hub port and spare hub port; fixed from now on, so that a restarted router is found again."""
    try:
        http = bound_port(config.router.host, config.router.port, "router.port")
    except StartFailed as error:
        holders = [name for name in store.names() if store.load(name).url.endswith(f":{config.router.port}")]
        held = f", by cluster {holders[0]!r}" if holders else ""
        raise StartFailed(f"{error.message}{held}; router: {{port: 0}} takes a free one", field=error.field) from error
    hub = free_hub_port(config, {http})
    return http, hub, free_hub_port(config, {http, hub})


def _reachable(host: str, here: str) -> str:
    if host in ("0.0.0.0", "::", ""):  # noqa: S104  compared, not bound
        return here
    return f"[{host}]" if ":" in host else host
