"""What an operator does to a cluster that is up: scale, drain, change a role, read a log.

Each asks the cluster's supervisor and waits until it is done; what was asked for stands, whoever waits. Replacing all
there is has a module of its own, :mod:`cluster.renewal`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from cluster.progress import Progress, Step, silent
from cluster.ray_node import connect, node_alive
from cluster.state import ClusterState, StateStore
from cluster.supervisor import SUPERVISOR_NAME, Answer, SupervisorReport
from protocol.errors import ClusterError, ClusterNotFound

POLL_SECONDS = 0.2
CALL_SECONDS = 30.0
"""For the supervisor to answer, also where Ray has to restart it first."""


class Operator:
    """Speaks with one cluster's supervisor.

    Args:
        ray: connected to the cluster.
        name: of the cluster.
    """

    def __init__(self, ray: Any, name: str) -> None:
        self._ray, self._name = ray, name

    def report(self) -> SupervisorReport:
        """How the cluster is.

        Raises:
            ClusterError: the supervisor does not answer.
        """
        return msgspec.json.decode(self._call("report"), type=SupervisorReport)

    def ask(self, method: str, *arguments: object) -> Answer:
        """Have the supervisor do something.

        Raises:
            KVFerryError: what it says against it.
        """
        answer = msgspec.json.decode(self._call(method, *arguments), type=Answer)
        if answer.error is not None:
            raise answer.error.to_error()
        return answer

    def until(self, done: Callable[[SupervisorReport], bool], progress: Progress, timeout: float) -> SupervisorReport:
        """Wait, telling of each step.

        Raises:
            ClusterError: it was not done within ``timeout`` seconds; names who is late. It goes on all the same.
        """
        deadline = time.monotonic() + timeout
        known: dict[str, tuple[str, str]] = {}
        while True:
            report = self.report()
            now = {member.name: (member.state, member.stage) for member in report.members}
            for member in report.members:
                if known.get(member.name) != now[member.name]:
                    stage = member.stage if member.state == "starting" and member.stage else member.state
                    progress(Step(actor=member.name, stage=stage, fraction=member.fraction))
            for name in known.keys() - now.keys():
                progress(Step(actor=name, stage="gone"))
            if done(report):
                return report
            known = now
            if time.monotonic() > deadline:
                late = ", ".join(
                    f"{member.name} ({member.state}{f': {member.error}' if member.error else ''})"
                    for member in report.members
                    if member.state != "ready" or member.outdated
                )
                raise ClusterError(f"not done within {timeout:g} s: {late}; it goes on, see: kvferry status")
            time.sleep(POLL_SECONDS)

    def _call(self, method: str, *arguments: object) -> bytes:
        deadline = time.monotonic() + CALL_SECONDS
        while True:
            try:
                actor = self._ray.get_actor(SUPERVISOR_NAME)
                answer: bytes = self._ray.get(
                    getattr(actor, method).remote(*arguments), timeout=max(0.1, deadline - time.monotonic())
                )
            except ValueError as error:
                raise ClusterError(f"cluster {self._name!r} has no supervisor") from error
            except self._ray.exceptions.RayActorError as error:
                # It has just died, and Ray makes a new one.
                if time.monotonic() > deadline:
                    raise ClusterError(f"the supervisor of {self._name!r} does not answer: {error}") from error
                time.sleep(POLL_SECONDS)
            except self._ray.exceptions.RayError as error:
                raise ClusterError(f"the supervisor of {self._name!r} does not answer: {error}") from error
            else:
                return answer


@contextmanager
def operator(name: str, store: StateStore | None = None) -> Iterator[tuple[Operator, ClusterState, Any]]:
    """A cluster's operator, its state and Ray.

    Raises:
        ClusterNotFound: no such cluster, or it is not up.
        ClusterError: its Ray cluster cannot be reached.
    """
    state = (StateStore() if store is None else store).load(name)
    if state.node is None or not state.ready or not node_alive(state.node):
        raise ClusterNotFound(f"cluster {name!r} is not up; see: kvferry status {name}")
    with connect(state.node, name) as ray:
        yield Operator(ray, name), state, ray


def scale(
    name: str,
    wanted: Mapping[str, int],
    progress: Progress = silent,
    *,
    timeout: float = 600.0,
    store: StateStore | None = None,
) -> SupervisorReport:
    """Have so many workers of each role; those too many drain. Gives how the cluster is then, as the others do.

    Raises:
        ConfigError: a role or a number is none.
        ClusterNotFound, ClusterError: as they say.
    """
    with operator(name, store) as (asked, _, _):
        asked.ask("scale", dict(wanted))
        return asked.until(lambda report: report.settled, progress, timeout)


def drain(
    name: str,
    worker: str,
    progress: Progress = silent,
    *,
    drain_timeout: float | None = None,
    timeout: float = 600.0,
    store: StateStore | None = None,
) -> SupervisorReport:
    """Let one worker leave for good, and wait until it is gone.

    Args:
        name: of the cluster.
        worker: its name.
        progress: told of each step.
        drain_timeout: seconds after which it hands back what it has not finished; None takes the cluster's own.
        timeout: seconds to wait.
        store: where the cluster is recorded.

    Raises:
        ClusterNotFound, ClusterError: as they say; also where the worker is the last of its role.
    """
    with operator(name, store) as (asked, _, _):
        asked.ask("drain", worker, drain_timeout)
        return asked.until(lambda report: worker not in {member.name for member in report.members}, progress, timeout)


def change_role(
    name: str,
    worker: str,
    role: str,
    progress: Progress = silent,
    *,
    drain_timeout: float | None = None,
    timeout: float = 600.0,
    store: StateStore | None = None,
) -> SupervisorReport:
    """Let one worker take the other role in its process, its weights staying loaded, and wait until it serves there.

    Args:
        name: of the cluster.
        worker: its name, which stays.
        role: "prefill" or "decode".
        progress: told of each step.
        drain_timeout: seconds after which it hands back what it has not finished; None takes the cluster's own.
        timeout: seconds to wait.
        store: where the cluster is recorded.

    Raises:
        ConfigError: there is no such role.
        ClusterNotFound, ClusterError: as they say; also where the worker is the last of its role.
    """
    with operator(name, store) as (asked, _, _):
        asked.ask("switch", worker, role, drain_timeout)
        wanted = (worker, role, "ready")
        return asked.until(
            lambda report: wanted in {(member.name, member.role, member.state) for member in report.members},
            progress,
            timeout,
        )


def log(name: str, member: str, lines: int, *, store: StateStore | None = None) -> str:
    """The last lines that a process of the cluster has written to its error output.

    Raises:
        ClusterNotFound, ClusterError: as they say.
    """
    with operator(name, store) as (_, _, ray):
        try:
            text: bytes = ray.get(ray.get_actor(member).log.remote(lines), timeout=CALL_SECONDS)
        except ValueError as error:
            known = ", ".join(sorted(ray.util.list_named_actors()))
            raise ClusterError(f"there is no process {member!r} (there are: {known})") from error
        except ray.exceptions.RayError as error:
            raise ClusterError(f"{member} does not answer: {error}") from error
    return text.decode(errors="replace")
