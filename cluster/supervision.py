"""Which processes a cluster shall have, and what to do about the difference. Decides only: no Ray, no clock.

Life cycle: made from a :class:`ClusterRecord`, told by :meth:`Supervision.observed` what is seen of each process and by
:meth:`Supervision.scale`, :meth:`Supervision.drain`, :meth:`Supervision.switch` and :meth:`Supervision.restart` what is
wanted; :meth:`tick` says what to do. A new one that is made from the last record that was saved goes on where the last
one ended.

* A member that dies is made again, with a higher incarnation, at once and then with growing pauses.
* Too many of a role: the surplus drains. Too few: new names are taken.
* One that is to take the other role keeps its name and its process: it drains and begins a new life there.
* A restart replaces members one by one, in each role: a new one comes up before an old one drains. Where there is no
  room for one more, an old one drains first, as long as another serves. Routers come last: a new one shall know the
  workers that stay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from cluster.config import ClusterConfig
from cluster.member import Member, MemberEvent, MemberRecord, MemberRole, MemberState, Sight
from cluster.scale_section import MAX_REPLICAS, ScaleSection
from protocol.errors import ClusterError, ConfigError
from protocol.ids import Role

ROLES: tuple[Role, ...] = ("prefill", "decode")
"""Roles that can be scaled."""
NO_ROOM_SECONDS = 10.0
"""A process that nobody has placed for so long finds no room."""
KILL_AFTER_SECONDS = 30.0
"""Beyond its time limit, what a process that leaves gets to be gone."""


class ClusterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept beyond the supervisor's life.

    Attributes:
        config: of every life that begins from now on.
        revision: of ``config``.
        wanted: how many members of each role.
        members: every name that is in use.
        incarnations: the highest that was given out.
    """

    config: ClusterConfig
    wanted: dict[MemberRole, int]
    members: tuple[MemberRecord, ...]
    revision: int = 1
    incarnations: int = 1

    @classmethod
    def first(cls, config: ClusterConfig) -> ClusterRecord:
        """Of a cluster that comes up: one router, and the workers of the configuration."""
        wanted: dict[MemberRole, int] = {"router": 1}
        wanted |= {"prefill": config.prefill.replicas, "decode": config.decode.replicas}
        members = (MemberRecord(name=f"{role}-{i}", role=role) for role, count in wanted.items() for i in range(count))
        return cls(config=config, wanted=wanted, members=tuple(members))


@dataclass(frozen=True, slots=True)
class Save:
    """Keep the record, before anything that follows is done."""

    record: ClusterRecord


@dataclass(frozen=True, slots=True)
class Create:
    """Make a process for this member."""

    member: MemberRecord


@dataclass(frozen=True, slots=True)
class Drain:
    """Ask a process to leave."""

    name: str
    timeout: float


@dataclass(frozen=True, slots=True)
class Switch:
    """Have a process become this member, once it has drained."""

    member: MemberRecord


@dataclass(frozen=True, slots=True)
class Kill:
    """End a process at once."""

    name: str


Instruction = Save | Create | Drain | Switch | Kill


class Supervision:
    """See the module.

    Args:
        record: where to begin; none of its members is taken to live before it was observed.
        now: monotonic seconds.
    """

    def __init__(self, record: ClusterRecord, now: float) -> None:
        self._record = record
        self._members = {member.name: Member(member, since=now) for member in record.members}
        self._observed: set[str] = set()
        self._asked: set[str] = set()
        self._switched: dict[str, int] = {}
        self._doomed: set[str] = set()
        self._saved: ClusterRecord | None = None

    @property
    def record(self) -> ClusterRecord:
        """As it is to be kept now."""
        members = tuple(member.record for member in self._members.values())
        return msgspec.structs.replace(self._record, members=members)

    @property
    def members(self) -> tuple[Member, ...]:
        """Every member, the router first."""
        order = ("router", *ROLES)
        return tuple(
            sorted(self._members.values(), key=lambda member: (order.index(member.record.role), member.record.index))
        )

    @property
    def settled(self) -> bool:
        """Whether everything is as it is wanted."""
        members = self._members.values()
        if any(member.record.leaving or not member.serves for member in members):
            return False
        return not any(self._outdated(role) or self._lacks(role) for role in self._record.wanted)

    @property
    def newest_router(self) -> str | None:
        """The one that began last of those that serve."""
        serving = [member.record for member in self._of("router") if member.serves]
        return max(serving, key=lambda record: record.incarnation).name if serving else None

    def fellows(self, name: str) -> dict[str, str]:
        """Roles of the workers beside ``name`` that are to stay as they are."""
        return {
            member.record.name: member.record.role
            for role in ROLES
            for member in self._staying(role)
            if member.record.name != name and member.record.revision == self._record.revision
        }

    # --- what is wanted -------------------------------------------------------------------------------------------

    def scale(self, wanted: Mapping[str, int]) -> None:
        """Have so many members of these roles.

        Raises:
            ConfigError: a role or a number is none; names it.
        """
        for role, count in wanted.items():
            if role not in ROLES:
                raise ConfigError(f"role must be one of {', '.join(ROLES)}, got {role!r}", field="role")
            if not 1 <= count <= MAX_REPLICAS:
                raise ConfigError(f"{role} must be in [1, {MAX_REPLICAS}], got {count!r}", field=role)
        self._want({**self._record.wanted, **wanted})  # type: ignore[dict-item]

    def drain(self, name: str, timeout: float) -> None:
        """Let this worker leave, and want one less of its role.

        Raises:
            ClusterError: there is no such worker, or it is the last that serves in its role.
        """
        member = self._worker(name)
        if member.record.leaving:
            self._leave(member, min(timeout, member.record.drain_timeout))
            self._asked.discard(name)
            return
        self._check_others(member)
        role = member.record.role
        self._want({**self._record.wanted, role: max(1, self._record.wanted[role] - 1)})
        self._leave(member, timeout)

    def switch(self, name: str, role: str, timeout: float) -> None:
        """Let this worker take another role in its process, and want one more of that and one less of its own.

        Raises:
            ConfigError: there is no such role.
            ClusterError: there is no such worker, it does not serve or is the last of its role that does, or Ray has
                set aside for it what is not what the other role asks for.
        """
        wanted = next((each for each in ROLES if each == role), None)
        if wanted is None:
            raise ConfigError(f"role must be one of {', '.join(ROLES)}, got {role!r}", field="role")
        member = self._worker(name)
        former = member.record.role
        assert former != "router", "it is a worker"
        if former == wanted and not member.record.leaving:
            return
        if member.record.leaving or not member.serves:
            raise ClusterError(f"{name} does not serve now, so it cannot take another role; see: kvferry status")
        self._check_others(member)
        config = self._record.config
        for field in ("cpus", "gpus", "resources"):
            has, wants = (getattr(config.section(each), field) for each in (former, wanted))
            if has != wants:
                raise ClusterError(
                    f"a {former} worker has {field} {has}, and a {wanted} worker wants {wants}: a process keeps what "
                    f"Ray has set aside for it; use: kvferry scale"
                )
        counts = self._record.wanted
        self.scale({former: max(1, counts[former] - 1), wanted: counts[wanted] + 1})
        incarnation = self._record.incarnations + 1
        self._record = msgspec.structs.replace(self._record, incarnations=incarnation)
        member.record = msgspec.structs.replace(
            member.record,
            role=wanted,
            incarnation=incarnation,
            revision=self._record.revision,
            drain_timeout=timeout,
        )
        member.seen = Sight.FORMER

    def restart(self, config: ClusterConfig, fixed: Collection[str] = ()) -> None:
        """Replace every member, one by one, by one of this configuration. Counts stay as they are.

        Args:
            config: of the new ones.
            fixed: routers that cannot share their port; each stays for as long as it lives.
        """
        self._record = msgspec.structs.replace(self._record, config=config, revision=self._record.revision + 1)
        for name in fixed:
            member = self._members[name]
            member.record = msgspec.structs.replace(member.record, fixed=True)

    def rescale(self, scale: ScaleSection) -> None:
        """Workers come and go by this from now on; those that there are stay as they are."""
        config = msgspec.structs.replace(self._record.config, scale=scale)
        self._record = msgspec.structs.replace(self._record, config=config)

    def _worker(self, name: str) -> Member:
        member = self._members.get(name)
        if member is None or member.record.role not in ROLES:
            known = ", ".join(member.record.name for member in self.members if member.record.role in ROLES)
            raise ClusterError(f"there is no worker {name!r} (there are: {known})")
        return member

    def _check_others(self, member: Member) -> None:
        role = member.record.role
        if not any(other.serves for other in self._staying(role) if other is not member):
            raise ClusterError(
                f"{member.record.name} is the only {role} worker that serves: nothing could be answered without it; "
                f"first: kvferry scale {role}={self._record.wanted[role] + 1}"
            )

    def _want(self, wanted: dict[MemberRole, int]) -> None:
        self._record = msgspec.structs.replace(self._record, wanted=wanted)

    # --- what happens ---------------------------------------------------------------------------------------------

    def observed(self, name: str, sight: Sight, now: float, error: str = "") -> None:
        """What is seen of a member's process."""
        member = self._members.get(name)
        if member is None:
            return
        self._observed.add(name)
        if member.observe(sight, error, now):
            self._doomed.add(name)
        elif sight is Sight.ABSENT:
            self._asked.discard(name)

    def tick(self, now: float) -> list[Instruction]:
        """What to do now, in this order."""
        out: list[Instruction] = [Kill(name) for name in sorted(self._doomed)]
        self._doomed.clear()
        if self._observed >= {*self._members}:
            # Before everybody was looked for nobody can be missed.
            for role in self._record.wanted:
                self._fit(role, now)
            out += self._see_off(now)
            out += self._turn_over(now)
            out += self._make(now)
        if self.record != self._saved:
            self._saved = self.record
            out.insert(0, Save(self._saved))
        return out

    def _fit(self, role: MemberRole, now: float) -> None:
        """Take new names, or let members go, until the number is right and nobody is out of date."""
        wanted, staying = self._record.wanted[role], self._staying(role)
        outdated = self._outdated(role)
        fresh = [member for member in staying if member not in outdated]
        if outdated and len(self._of(role)) <= wanted and all(member.serves for member in fresh):
            self._enrol(role, now)
            return
        while len(staying) < wanted:
            staying.append(self._enrol(role, now))
        if len(staying) <= wanted:
            return
        if outdated:
            self._replace_one(outdated, fresh, now)
            return
        surplus = sorted(staying, key=lambda member: (member.serves, -member.record.index))
        for member in surplus[: len(staying) - wanted]:
            self._leave(member, self._record.config.scale.drain_timeout)

    def _replace_one(self, outdated: list[Member], fresh: list[Member], now: float) -> None:
        waiting = [member for member in fresh if not member.serves]
        useless = [member for member in outdated if not member.serves]
        stuck = any(
            member.state is MemberState.STARTING
            and member.seen is Sight.PLACING
            and now - member.since >= NO_ROOM_SECONDS
            for member in waiting
        )
        others = len(outdated) + len(fresh) - len(waiting) - len(useless) - 1
        if useless or not waiting or (stuck and others >= 1):
            victim = (useless or sorted(outdated, key=lambda member: member.record.index))[0]
            self._leave(victim, self._record.config.scale.drain_timeout)

    def _see_off(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for name, member in list(self._members.items()):
            if not member.record.leaving:
                continue
            if member.tracker.allows(MemberEvent.DRAIN):
                member.move(MemberEvent.DRAIN, now)
            if member.state is MemberState.GONE:
                del self._members[name]
                self._asked.discard(name)
            elif name not in self._asked:
                self._asked.add(name)
                out.append(Drain(name, member.record.drain_timeout))
            elif now - member.since > self._patience(member):
                out.append(Kill(name))
        return out

    def _turn_over(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for name, member in self._members.items():
            if member.state is not MemberState.SWITCHING:
                continue
            if self._switched.get(name) != member.record.incarnation:
                self._switched[name] = member.record.incarnation
                out.append(Switch(member.record))
            elif member.seen is Sight.FORMER and now - member.since > self._patience(member):
                out.append(Kill(name))  # it is made again in its new role
        return out

    @staticmethod
    def _patience(member: Member) -> float:
        if member.seen is Sight.PLACING:
            return NO_ROOM_SECONDS  # nobody hears what it is asked
        return member.record.drain_timeout + KILL_AFTER_SECONDS

    def _make(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for name, member in self._members.items():
            if member.state is MemberState.MISSING and now >= member.due:
                incarnation = self._record.incarnations + 1
                self._record = msgspec.structs.replace(self._record, incarnations=incarnation)
                revision, lives = self._record.revision, member.record.lives + 1
                begun = {"incarnation": incarnation, "revision": revision, "lives": lives}
                member.record = msgspec.structs.replace(member.record, fixed=False, **begun)
                member.move(MemberEvent.CREATED, now)
                member.seen = Sight.PLACING
                out.append(Create(self._members[name].record))
        return out

    def _enrol(self, role: MemberRole, now: float) -> Member:
        # Whoever took another role has kept its name.
        index = next(number for number in range(len(self._members) + 1) if f"{role}-{number}" not in self._members)
        record = MemberRecord(name=f"{role}-{index}", role=role, revision=self._record.revision, lives=0)
        self._members[record.name] = member = Member(record, since=now)
        self._observed.add(record.name)
        return member

    def _leave(self, member: Member, timeout: float) -> None:
        member.record = msgspec.structs.replace(member.record, leaving=True, drain_timeout=timeout)

    def _of(self, role: MemberRole) -> list[Member]:
        return [member for member in self._members.values() if member.record.role == role]

    def _staying(self, role: MemberRole) -> list[Member]:
        return [member for member in self._of(role) if not member.record.leaving]

    def _lacks(self, role: MemberRole) -> bool:
        return len(self._staying(role)) != self._record.wanted[role]

    def _outdated(self, role: MemberRole) -> list[Member]:
        """Members whose life is of an earlier configuration, and shall end; routers' only once no worker's is."""
        if role == "router" and any(self._outdated(each) for each in ROLES):
            return []
        last = self._record.revision
        return [each for each in self._staying(role) if each.record.revision < last and not each.record.fixed]
