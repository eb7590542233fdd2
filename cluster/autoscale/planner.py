"""Decides how many workers there shall be, and which of them go or change their role. Pure.

Life cycle: made with its bounds and targets, told of members and load every few seconds by :meth:`Planner.plan`, which
gives what to do, and why.

* More are wanted at once when the load of the last seconds needs them. A worker that the other role could have done
  without for a while changes its role; only what is still missing is made.
* Fewer are wanted when for long enough never more were needed, with room to spare, and then the ones that do least
  leave. So what comes and goes does so slowly in one direction: a burst that comes again finds what the last one left.
* Nothing leaves while anything is on its way, targets are missed, or the last change is fresh.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.autoscale.need import Need, needed
from cluster.autoscale.observer import Load, Seen
from cluster.scale_section import AutoSection
from protocol.ids import Role

ROLES: tuple[Role, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Staying:
    """A worker that is not on its way out.

    Attributes:
        name, role: of it.
        ready: whether it serves, in that role.
        work: what it has to do; the least goes first.
    """

    name: str
    role: Role
    ready: bool
    work: float = 0.0


@dataclass(frozen=True, slots=True)
class Provide:
    """Have machines for so many workers of each role."""

    prefill: int
    decode: int
    why: str


@dataclass(frozen=True, slots=True)
class Switch:
    """Let a worker take another role."""

    worker: str
    role: Role
    why: str


@dataclass(frozen=True, slots=True)
class Grow:
    """Have so many workers of a role, more than there are."""

    role: Role
    workers: int
    why: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Let a worker finish what it has and be gone."""

    worker: str
    role: Role
    why: str


Action = Provide | Switch | Grow | Leave


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One decision.

    Attributes:
        workers: that there are, by role, those on their way included.
        needs: what the load needs of each role.
        actions: what to do, in this order.
        held: why nothing leaves though fewer would do, or none come though more would; "" for neither.
    """

    workers: Mapping[Role, int]
    needs: Mapping[Role, Need]
    actions: tuple[Action, ...] = ()
    held: str = ""


@dataclass(slots=True)
class _History:
    """What was needed of one role lately, with room to spare."""

    needs: deque[tuple[float, int]] = field(default_factory=deque)
    since: float | None = None

    def add(self, count: int, now: float, keep: float) -> None:
        if self.since is None:
            self.since = now
        self.needs.append((now, count))
        while self.needs[0][0] < now - keep:
            self.needs.popleft()

    def most(self, seconds: float, now: float) -> int | None:
        """In the last so many seconds; None where less was seen."""
        if self.since is None or now - self.since < seconds:
            return None
        return max(count for at, count in self.needs if at >= now - seconds)


class Planner:
    """See the module.

    Args:
        auto: bounds, targets and times.
        exchangeable: whether a worker of one role can take the other.
    """

    def __init__(self, auto: AutoSection, *, exchangeable: bool = True) -> None:
        self._auto, self._exchangeable = auto, exchangeable
        self._histories: dict[Role, _History] = {role: _History() for role in ROLES}
        self._changed: float | None = None
        self._provided: tuple[int, int] | None = None

    def plan(self, staying: Sequence[Staying], seen: Seen, now: float) -> Plan:
        """What to do now.

        Args:
            staying: every worker that is not on its way out.
            seen: the load.
            now: monotonic seconds.
        """
        auto = self._auto
        counts: dict[Role, int] = {role: sum(each.role == role for each in staying) for role in ROLES}
        needs = {role: self._bounded(role, needed(role, seen.lately, auto)) for role in ROLES}
        for role in ROLES:
            roomy = self._bounded(role, needed(role, seen.steadily, auto, more=auto.headroom))
            self._histories[role].add(roomy.workers, now, max(auto.down_after, auto.cooldown))
        before = dict(counts)
        pool = list(staying)
        actions, held = self._grow(counts, needs, pool, now)
        if not actions:
            actions, waits = self._shrink(counts, pool, seen.lately, now)
            held = held or waits
        if actions:
            self._changed = now
        wanted = counts["prefill"], counts["decode"]
        if wanted != self._provided:
            self._provided = wanted
            actions = [Provide(*wanted, "machines for the workers that are wanted"), *actions]
        return Plan(workers=before, needs=needs, actions=tuple(actions), held=held)

    def _bounded(self, role: Role, need: Need) -> Need:
        bounds = self._auto.bounds(role)
        if need.workers > bounds.max:
            return Need(bounds.max, f"{need.why}; {need.workers} would be right, {bounds.max} is the most")
        if need.workers < bounds.min:
            return Need(bounds.min, f"{need.why}; {bounds.min} is the least")
        return need

    # --- more -----------------------------------------------------------------------------------------------------

    def _grow(
        self, counts: dict[Role, int], needs: Mapping[Role, Need], pool: list[Staying], now: float
    ) -> tuple[list[Action], str]:
        actions: list[Action] = []
        held = ""
        # Who lacks most of what it needs is helped first.
        for role in sorted(ROLES, key=lambda role: counts[role] / needs[role].workers):
            missing = needs[role].workers - counts[role]
            if missing <= 0:
                continue
            why = f"{role}: {needs[role].workers} needed, {counts[role]} there: {needs[role].why}"
            switches = self._switches(role, missing, counts, needs, pool, why, now)
            actions += switches
            missing -= len(switches)
            room = self._room(counts)
            if missing > room:
                held = f"{missing - room} more {role} workers are needed: max_workers is {self._auto.max_workers}"
                missing = room
            if missing > 0:
                counts[role] += missing
                actions.append(Grow(role, counts[role], why))
        return actions, held

    def _switches(
        self,
        role: Role,
        missing: int,
        counts: dict[Role, int],
        needs: Mapping[Role, Need],
        pool: list[Staying],
        why: str,
        now: float,
    ) -> list[Action]:
        """Of the other role, those that have been more than enough for a while; ``counts`` and ``pool`` follow."""
        other: Role = "decode" if role == "prefill" else "prefill"
        enough = self._histories[other].most(self._auto.cooldown, now)
        spare = sorted((each for each in pool if each.role == other), key=lambda each: each.work)
        if not self._exchangeable or enough is None or not all(each.ready for each in spare):
            return []
        enough = max(enough, needs[other].workers)
        taken = spare[: max(0, min(missing, counts[other] - enough))]
        for each in taken:
            pool.remove(each)
        counts[role] += len(taken)
        counts[other] -= len(taken)
        text = f"{why}; {other} has needed {enough} at most for {self._auto.cooldown:g} s"
        return [Switch(each.name, role, text) for each in taken]

    def _room(self, counts: Mapping[Role, int]) -> int:
        most = self._auto.max_workers
        return (
            sum(self._auto.bounds(role).max for role in ROLES) if most is None else max(0, most - sum(counts.values()))
        )

    # --- fewer ----------------------------------------------------------------------------------------------------

    def _shrink(self, counts: dict[Role, int], pool: list[Staying], load: Load, now: float) -> tuple[list[Action], str]:
        enough = {role: self._enough(role, counts[role], now) for role in ROLES}
        if all(counts[role] <= enough[role] for role in ROLES):
            return [], ""
        if not all(each.ready for each in pool):
            return [], "fewer would do, but some are on their way"
        if self._fresh(now):
            return [], f"fewer would do, but the last change is less than {self._auto.cooldown:g} s old"
        if min(load.ttft_met, load.tpot_met) < self._auto.percentile:
            return [], "fewer would do, but targets are missed"
        if load.refused_share > 1 - self._auto.percentile:
            return [], "fewer would do, but requests are refused"
        actions: list[Action] = []
        for role in ROLES:
            spare = sorted((each for each in pool if each.role == role), key=lambda each: each.work)
            why = f"{role}: never more than {enough[role]} needed for {self._auto.down_after:g} s, {counts[role]} there"
            if counts[role] > self._auto.bounds(role).max:
                why = f"{role}: {self._auto.bounds(role).max} is the most, {counts[role]} there"
            for each in spare[: counts[role] - enough[role]]:
                counts[role] -= 1
                actions.append(Leave(each.name, role, why))
        return actions, ""

    def _enough(self, role: Role, count: int, now: float) -> int:
        most = self._histories[role].most(self._auto.down_after, now)
        return min(count if most is None else most, self._auto.bounds(role).max)

    def _fresh(self, now: float) -> bool:
        return self._changed is not None and now - self._changed < self._auto.cooldown
