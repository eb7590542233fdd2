"""The processes of a cluster as Ray knows them: a handle for each, and a question to each that is under way.

Life cycle: made empty by the supervisor's thread, which asks it at every turn; it keeps nothing that Ray does not know.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import msgspec

from cluster.actors import ActorStatus, create_actor
from cluster.member import MemberRecord, Sight
from cluster.placement import least_used, machines_of
from cluster.plan import ActorOrder


class Crew:
    """See the module.

    Args:
        ray: connected to the cluster.

    Attributes:
        statuses: what each said last in its present life.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._handles: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}
        self._sent: dict[str, str] = {}
        self.statuses: dict[str, ActorStatus] = {}

    def look(self, members: list[MemberRecord]) -> list[tuple[str, Sight, str]]:
        """What is seen of each: name, sight and the error that it told of."""
        for name in {*self._handles} - {member.name for member in members}:
            self._forget(name)
        return [(member.name, *self._look_at(member.name, member.incarnation)) for member in members]

    def create(self, order: ActorOrder, fellows: Mapping[str, str]) -> None:
        """Make a process; one that cannot be made is absent at the next look.

        Args:
            order: what it is told.
            fellows: roles of the workers, by name, that it shall not be beside, where it is to be spread.
        """
        self._forget(order.name)
        try:
            node = self._node_for(order, fellows) if order.spread else None
            self._handles[order.name] = create_actor(self._ray, order, node)
            if node is not None:
                self._sent[order.name] = node
        except ValueError:  # Ray's word for a name that is taken: the former life is not buried yet
            traceback.print_exc()

    def can(self, name: str, method: str) -> bool:
        """Whether a process has such a method, by the class that it was made of; one that is not there may have any."""
        try:
            return hasattr(self._handles.get(name) or self._ray.get_actor(name), method)
        except ValueError:
            return True

    def drain(self, name: str, timeout: float) -> None:
        """Ask a process to leave."""
        if name in self._handles:
            self._handles[name].drain.remote(timeout)

    def switch(self, order: ActorOrder, timeout: float) -> None:
        """Have a process drain and then go on by another order."""
        if order.name in self._handles:
            self._handles[order.name].switch.remote(msgspec.json.encode(order), timeout)

    def kill(self, name: str) -> None:
        """End a process at once."""
        if name in self._handles:
            self._ray.kill(self._handles[name], no_restart=True)

    def _node_for(self, order: ActorOrder, fellows: Mapping[str, str]) -> str | None:
        seen = {name: status.node for name, status in self.statuses.items()}
        nodes = self._sent | seen
        others = [(role, nodes[name]) for name, role in fellows.items() if name in nodes]
        return least_used(order, machines_of(self._ray), others)

    def _look_at(self, name: str, incarnation: int) -> tuple[Sight, str]:
        if name not in self._handles:
            try:
                self._handles[name] = self._ray.get_actor(name)
            except ValueError:
                return Sight.ABSENT, ""
        if name not in self._asked:
            self._asked[name] = self._handles[name].status.remote()
        done, _ = self._ray.wait([self._asked[name]], timeout=0)
        if done:
            call = self._asked.pop(name)
            try:
                self.statuses[name] = msgspec.json.decode(self._ray.get(call), type=ActorStatus)
            except self._ray.exceptions.ActorUnavailableError:
                pass  # cut off for now; Ray says so when it is dead
            except self._ray.exceptions.RayError as error:
                told = self.statuses.get(name)
                self._forget(name)
                return Sight.ABSENT, (told.error if told is not None else "") or str(error).splitlines()[0]
        status = self.statuses.get(name)
        if status is None:
            return Sight.PLACING, ""
        if status.state == "failed":
            return Sight.FAILED, status.error
        if status.incarnation != incarnation:
            return Sight.FORMER, ""
        if status.draining:
            return Sight.LEAVING, ""
        return (Sight.READY if status.state == "ready" else Sight.STARTING), ""

    def _forget(self, name: str) -> None:
        for book in (self._handles, self._asked, self._sent, self.statuses):
            book.pop(name, None)
