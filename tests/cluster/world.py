"""What Ray would do for a supervision: processes that live, leave and die."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cluster.config import ClusterConfig, RoleSection, ScaleSection
from cluster.member import MemberRecord, Sight
from cluster.supervision import (
    ClusterRecord,
    Create,
    Drain,
    Instruction,
    Kill,
    Save,
    Supervision,
    Switch,
)

LIMIT = 60.0


class World:
    """What Ray would do: processes that come up, leave when asked, and die when the test says so.

    Args:
        prefill, decode: workers.
        room: for so many workers; a router needs none.
    """

    def __init__(self, prefill: int = 1, decode: int = 1, *, room: int = 99) -> None:
        config = ClusterConfig(
            model="m", prefill=RoleSection(replicas=prefill), scale=ScaleSection(drain_timeout=LIMIT)
        )
        config = msgspec.structs.replace(config, decode=msgspec.structs.replace(config.decode, replicas=decode))
        self.now = 100.0
        self.room = room
        self.saved = ClusterRecord.first(config)
        self.alive: dict[str, MemberRecord] = {}
        self.seen: dict[str, Sight] = {}
        self.done: list[Instruction] = []
        self.stubborn: set[str] = set()
        for member in self.saved.members:
            self.place(member)
        self.supervision = Supervision(self.saved, self.now)

    def place(self, member: MemberRecord) -> None:
        assert member.name not in self.alive, "two lives of one name"
        self.alive[member.name] = member
        fits = member.role == "router" or self._placed() < self.room
        self.seen[member.name] = Sight.READY if fits else Sight.PLACING

    def die(self, name: str) -> None:
        del self.alive[name]
        del self.seen[name]
        for other, sight in self.seen.items():
            if sight is Sight.PLACING and self._placed() < self.room:
                self.seen[other] = Sight.READY

    def _placed(self) -> int:
        return sum(
            self.alive[name].role != "router" and sight is not Sight.PLACING for name, sight in self.seen.items()
        )

    def turn(self, seconds: float = 0.2) -> list[Instruction]:
        self.now += seconds
        for member in self.supervision.members:
            name = member.record.name
            sight = self.seen.get(name, Sight.ABSENT)
            if name in self.alive and self.alive[name].incarnation != member.record.incarnation:
                sight = Sight.FORMER
            self.supervision.observed(name, sight, self.now, error="")
        instructions = self.supervision.tick(self.now)
        self.done += instructions
        for instruction in instructions:
            match instruction:
                case Save(record):
                    self.saved = record
                case Create(member):
                    kept = {each.name: each for each in self.saved.members}
                    assert kept[member.name] == member, "it is on record before it is made"
                    self.place(member)
                case Drain(name, _):
                    if name in self.alive and name not in self.stubborn:
                        self.die(name)
                case Switch(member):
                    kept = {each.name: each for each in self.saved.members}
                    assert kept[member.name] == member, "it is on record before it is asked"
                    if member.name in self.alive and member.name not in self.stubborn:
                        self.alive[member.name] = member
                case Kill(name):
                    if name in self.alive:
                        self.die(name)
        return instructions

    def settle(self, serving: Callable[[], bool] = lambda: True, turns: int = 400) -> None:
        for _ in range(turns):
            self.turn()
            assert serving(), "too few serve"
            if self.supervision.settled:
                return
        raise AssertionError(f"never settled: {[(m.record, m.state, m.seen) for m in self.supervision.members]}")

    def names(self) -> list[str]:
        return sorted(self.alive)

    def serving(self, role: str) -> int:
        return sum(self.seen[name] is Sight.READY and member.role == role for name, member in self.alive.items())
