"""Which machines of a Ray cluster there are, whether they are enough, and which of them a worker goes to.

Ray places a worker at once where there is room, so on a cluster that is still growing all of them would come to the
first machine. Hence a cluster that comes up waits for the machines that its file asks for; and a worker that shall be
spread is given its machine here, for Ray does not look at who else is there. What decides is pure; :func:`machines_of`
asks Ray. Nothing that runs is moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.config import ClusterConfig
from cluster.plan import ActorOrder

Resources = Mapping[str, float]
_INTERNAL = frozenset({"memory", "object_store_memory", "node:__internal_head__"})
LOOPBACK = ("127.", "::1")
NAMED_AT_MOST = 4
"""Machines whose addresses are told in one line."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One node of Ray's that lives.

    Attributes:
        node: its id.
        address: of it.
        total: resources that it has, by Ray's names.
        free: what of them is not set aside.
    """

    node: str
    address: str
    total: Resources
    free: Resources

    def could_take(self, wanted: Resources) -> bool:
        """Whether that is there, be it in use or not."""
        return _covers(self.total, wanted)

    def has_room(self, wanted: Resources) -> bool:
        """Whether that is free."""
        return _covers(self.free, wanted)

    def with_one_more(self, wanted: Resources) -> Machine:
        """Itself, once that has been set aside."""
        return replace(self, free={name: amount - wanted.get(name, 0.0) for name, amount in self.free.items()})


def machines_of(ray: Any) -> tuple[Machine, ...]:
    """Those that have joined and live; the calling process is connected to Ray."""
    free = ray._private.state.available_resources_per_node()
    return tuple(
        Machine(node["NodeID"], node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    )


def lacking(config: ClusterConfig, machines: Sequence[Machine]) -> str:
    """Which machines are still to come before workers can be placed as the file has it; "" when none are."""
    if config.ray.address is None:
        return ""
    if config.ray.machines is not None:
        return _short(config.ray.machines, machines, "ray.machines")
    spread = [section for section in (config.prefill, config.decode) if section.placement == "spread"]
    # So many are a spread at all; how many there shall be only ray.machines says.
    least = min(2, sum(section.replicas for section in spread))
    could = [each for each in machines if any(each.could_take(section.reserved) for section in spread)]
    return _short(least, could, "placement: spread; ray: {machines: ...} says another number")


def _short(wanted: int, there: Sequence[Machine], by: str) -> str:
    if len(there) >= wanted:
        return ""
    return f"{wanted} machines ({by}), {len(there)} there{_named(each.address for each in there)}{_alone(there)}"


def _alone(there: Sequence[Machine]) -> str:
    """Why no other machine can join, where the one that is there says so itself."""
    if not there or not all(each.address.startswith(LOOPBACK) for each in there):
        return ""
    return ", which no other machine reaches: start Ray's head with --node-ip-address"


def _named(addresses: Iterable[str]) -> str:
    words = sorted(addresses)
    more = [f"{len(words) - NAMED_AT_MOST} more"] if len(words) > NAMED_AT_MOST else []
    return f": {', '.join([*words[:NAMED_AT_MOST], *more])}" if words else ""


def least_used(order: ActorOrder, machines: Iterable[Machine], others: Iterable[tuple[str, str]]) -> str | None:
    """The node for a worker: with room for it, and the fewest of its role, then the fewest of all.

    Args:
        order: of the worker.
        machines: that there are.
        others: role and node of each worker that is there.

    Returns:
        None where none has room.
    """
    others = list(others)
    alike = Counter(node for role, node in others if role == order.role)
    everyone = Counter(node for _, node in others)
    room = [each for each in machines if each.has_room(order.reserved)]
    best = min(room, key=lambda each: (alike[each.node], everyone[each.node], each.address, each.node), default=None)
    return None if best is None else best.node


def spread_out(orders: Iterable[ActorOrder], machines: Sequence[Machine]) -> dict[str, str]:
    """A node for each worker that shall be spread, by its name; those that find no room are left to Ray."""
    found: dict[str, str] = {}
    here = {each.node: each for each in machines}
    others: list[tuple[str, str]] = []
    for order in orders:
        node = least_used(order, here.values(), others) if order.spread else None
        if node is not None:
            found[order.name] = node
            here[node] = here[node].with_one_more(order.reserved)
            others.append((order.role, node))
    return found


def unused(machines: Iterable[Machine], nodes: Iterable[str]) -> tuple[str, ...]:
    """Addresses of the machines that are none of these nodes."""
    known = set(nodes)
    return tuple(sorted(each.address for each in machines if each.node not in known))


def unused_line(addresses: Sequence[str]) -> str:
    """What a person is told of machines that nothing runs on; "" where there are none."""
    if not addresses:
        return ""
    return (
        f"machines of Ray without a process of this cluster{_named(addresses)}; nothing moves there by itself, new "
        "workers may go there: kvferry scale, kvferry restart"
    )


def amounts(resources: Resources) -> str:
    """Resources as a person wants them told; Ray's own bookkeeping is left out."""
    told = {name: amount for name, amount in resources.items() if name not in _INTERNAL and amount}
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(told.items())) or "nothing"


def _covers(there: Resources, wanted: Resources) -> bool:
    return all(there.get(name, 0.0) >= amount for name, amount in wanted.items())
