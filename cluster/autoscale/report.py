"""What is told of the autoscaler, as values and for a person."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from rich.table import Table

from cluster.autoscale.planner import ROLES, Action, Grow, Leave, Plan, Provide, Switch
from cluster.scale_section import AutoSection


class RoleReport(msgspec.Struct, frozen=True, kw_only=True):
    """One role.

    Attributes:
        workers: that there are, those on their way included.
        needed: by the load.
        why: so many are.
    """

    workers: int
    needed: int
    why: str


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was done, or would be.

    Attributes:
        what: was done.
        why: it was.
        seconds_ago: when.
        error: why it could not be; "" where it could.
    """

    what: str
    why: str
    seconds_ago: float = 0.0
    error: str = ""


class AutoscaleReport(msgspec.Struct, frozen=True, kw_only=True):
    """How the autoscaler is.

    Attributes:
        auto: what it goes by.
        roles: as at the last decision; empty before the first.
        held: why nothing is done though the numbers differ; "" for no such reason.
        changes: the last ones, the newest last.
        error: why the router does not tell it anything; "" where it does.
    """

    auto: AutoSection
    roles: dict[str, RoleReport] = {}
    held: str = ""
    changes: tuple[Change, ...] = ()
    error: str = ""


def roles_of(plan: Plan) -> dict[str, RoleReport]:
    """What a decision says of each role."""
    return {
        role: RoleReport(workers=plan.workers[role], needed=plan.needs[role].workers, why=plan.needs[role].why)
        for role in ROLES
    }


def spelled(action: Action) -> str:
    """What an action does."""
    match action:
        case Provide(prefill, decode, _):
            return f"ask Ray for {prefill} prefill and {decode} decode workers' machines"
        case Switch(worker, role, _):
            return f"kvferry role {worker} {role}"
        case Grow(role, workers, _):
            return f"kvferry scale {role}={workers}"
        case Leave(worker, _, _):
            return f"kvferry drain {worker}"


def roles_table(roles: dict[str, RoleReport]) -> Table:
    """A row for each role."""
    table = Table("role", "workers", "needed", "why", box=None, pad_edge=False)
    for role, each in roles.items():
        table.add_row(role, str(each.workers), str(each.needed), each.why)
    return table


def change_lines(changes: Iterable[Change]) -> list[str]:
    """Each change in a line."""
    return [
        f"{f'{each.seconds_ago:.0f} s ago: ' if each.seconds_ago else ''}{each.what}"
        f"{f' (could not: {each.error})' if each.error else ''}: {each.why}"
        for each in changes
    ]
