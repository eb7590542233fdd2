from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import ClusterConfig, RoleSection, ScaleSection
from cluster.member import MAX_PAUSE_SECONDS, STEADY_SECONDS, MemberRecord, Sight
from cluster.supervision import (
    KILL_AFTER_SECONDS,
    NO_ROOM_SECONDS,
    ClusterRecord,
    Create,
    Drain,
    Instruction,
    Kill,
    Save,
    Supervision,
    Switch,
)
from protocol.errors import ClusterError, ConfigError

LIMIT = 60.0


class World:
    """What Ray would do: processes that come up, leave when asked, and die when the test says so."""

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
        placed = sum(sight is not Sight.PLACING for sight in self.seen.values())
        self.seen[member.name] = Sight.READY if placed < self.room else Sight.PLACING

    def die(self, name: str) -> None:
        del self.alive[name]
        del self.seen[name]
        for other, sight in self.seen.items():
            if sight is Sight.PLACING and sum(each is not Sight.PLACING for each in self.seen.values()) < self.room:
                self.seen[other] = Sight.READY

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


def test_a_cluster_as_it_shall_be_is_left_alone() -> None:
    world = World(2, 1)
    world.settle()
    assert [type(each) for each in world.done] == [Save]
    assert world.turn() == []


def test_what_dies_is_made_again_with_a_higher_incarnation() -> None:
    world = World()
    world.settle()
    for name in ("decode-0", "router-0", "decode-0"):
        before = max(member.incarnation for member in world.alive.values())
        world.die(name)
        world.settle()
        assert world.alive[name].incarnation > before


def test_what_dies_again_and_again_is_made_with_growing_pauses() -> None:
    world = World()
    world.settle()
    made = []
    for _ in range(9):
        world.die("decode-0")
        while "decode-0" not in world.alive:
            world.turn(0.1)
        made.append(world.now)
    pauses = [later - earlier for earlier, later in pairwise(made)]
    assert pauses[0] < pauses[2] < pauses[4]
    assert max(pauses) == pytest.approx(MAX_PAUSE_SECONDS, abs=0.5)
    world.turn()
    world.turn(STEADY_SECONDS)
    world.die("decode-0")
    world.turn()
    assert "decode-0" in world.alive, "a steady life begins anew"


def test_one_that_fails_is_ended_and_made_again() -> None:
    world = World()
    world.settle()
    world.seen["prefill-0"] = Sight.FAILED
    assert Kill("prefill-0") in world.turn()
    world.settle()
    assert world.alive["prefill-0"].incarnation > 1


def test_scaling_takes_new_names_and_lets_the_last_ones_go() -> None:
    world = World()
    world.supervision.scale({"prefill": 3, "decode": 2})
    world.settle()
    assert world.names() == ["decode-0", "decode-1", "prefill-0", "prefill-1", "prefill-2", "router-0"]
    world.supervision.scale({"prefill": 1})
    world.settle(lambda: world.serving("prefill") >= 1)
    assert world.names() == ["decode-0", "decode-1", "prefill-0", "router-0"]
    assert {each.name for each in world.done if isinstance(each, Drain)} == {"prefill-1", "prefill-2"}
    assert world.saved.wanted == {"router": 1, "prefill": 1, "decode": 2}


def test_scaling_down_takes_those_first_that_do_not_serve() -> None:
    world = World(3)
    world.seen["prefill-0"] = Sight.STARTING
    world.supervision.scale({"prefill": 2})
    world.settle()
    assert "prefill-0" not in world.alive


@pytest.mark.parametrize("wanted", [{"router": 2}, {"prefill": 0}, {"decode": 2000}, {"pigeon": 1}])
def test_nonsense_is_refused_by_name(wanted: dict[str, int]) -> None:
    world = World()
    with pytest.raises(ConfigError, match=next(iter(wanted))):
        world.supervision.scale(wanted)
    world.settle()
    assert world.saved.wanted == {"router": 1, "prefill": 1, "decode": 1}


def test_a_drained_worker_leaves_for_good() -> None:
    world = World(2)
    world.settle()
    world.stubborn.add("prefill-0")
    world.supervision.drain("prefill-0", 5.0)
    for _ in range(20):
        world.turn()
    assert world.done.count(Drain("prefill-0", 5.0)) == 1
    assert not world.supervision.settled
    world.die("prefill-0")
    world.settle()
    assert world.names() == ["decode-0", "prefill-1", "router-0"]
    world.supervision.scale({"prefill": 2})
    world.settle()
    assert world.alive["prefill-0"].incarnation > 1, "the name may come again, never an old life of it"


def test_one_that_does_not_leave_in_time_is_ended() -> None:
    world = World(2)
    world.settle()
    world.stubborn.add("prefill-0")
    world.supervision.drain("prefill-0", 5.0)
    world.turn()
    world.turn(5.0 + KILL_AFTER_SECONDS - 0.5)
    assert "prefill-0" in world.alive
    world.turn(1.0)
    assert "prefill-0" not in world.alive


def test_one_that_found_no_room_is_given_up_without_being_asked() -> None:
    world = World(1, 1, room=3)
    world.settle()
    world.supervision.scale({"decode": 2})
    for _ in range(3):
        world.turn()
    assert world.seen["decode-1"] is Sight.PLACING
    world.stubborn.add("decode-1")
    world.supervision.scale({"decode": 1})
    world.turn()
    world.turn(NO_ROOM_SECONDS)
    world.settle()
    assert world.names() == ["decode-0", "prefill-0", "router-0"]


def test_the_last_that_serves_stays() -> None:
    world = World(2)
    world.settle()
    world.seen["prefill-1"] = Sight.STARTING
    world.turn()
    for name in ("prefill-0", "decode-0"):
        with pytest.raises(ClusterError, match="kvferry scale"):
            world.supervision.drain(name, 1.0)
    for name in ("router-0", "prefill-9"):
        with pytest.raises(ClusterError, match=f"no worker '{name}'"):
            world.supervision.drain(name, 1.0)


def test_a_worker_takes_the_other_role_in_its_process() -> None:
    world = World(2, 1)
    world.settle()
    process = world.alive["prefill-1"]
    world.supervision.switch("prefill-1", "decode", 5.0)
    assert not world.supervision.settled, "it has not become so by being told"
    world.settle(lambda: world.serving("prefill") >= 1)
    assert world.names() == ["decode-0", "prefill-0", "prefill-1", "router-0"]
    assert world.saved.wanted == {"router": 1, "prefill": 1, "decode": 2}
    assert world.alive["prefill-1"].role == "decode"
    assert world.alive["prefill-1"].incarnation > process.incarnation
    assert not [each for each in world.done if isinstance(each, Create | Drain | Kill)]
    world.supervision.switch("prefill-1", "decode", 5.0)
    assert world.turn() == [], "it has that role"
    world.supervision.scale({"prefill": 2})
    world.settle()
    assert world.names() == ["decode-0", "prefill-0", "prefill-1", "prefill-2", "router-0"], "its name is taken"
    world.supervision.switch("prefill-1", "prefill", 5.0)
    world.settle()
    assert (world.serving("prefill"), world.serving("decode")) == (3, 1)


def test_one_that_dies_on_its_way_to_another_role_is_made_again_in_that() -> None:
    world = World(2, 1)
    world.settle()
    world.stubborn.add("prefill-1")
    world.supervision.switch("prefill-1", "decode", 5.0)
    world.turn()
    world.die("prefill-1")
    world.settle()
    (made,) = [each.member for each in world.done if isinstance(each, Create)]
    assert (made.name, made.role) == ("prefill-1", "decode")


def test_one_that_does_not_come_to_its_new_role_is_ended() -> None:
    world = World(2, 1)
    world.settle()
    world.stubborn.add("prefill-1")
    world.supervision.switch("prefill-1", "decode", 5.0)
    world.turn()
    world.turn(5.0 + KILL_AFTER_SECONDS - 0.5)
    assert not [each for each in world.done if isinstance(each, Kill)]
    world.turn(1.0)
    assert Kill("prefill-1") in world.done
    world.settle()
    assert world.serving("decode") == 2


def test_a_new_supervisor_asks_again_who_had_not_taken_its_role() -> None:
    world = World(2, 1)
    world.settle()
    world.stubborn.add("prefill-1")
    world.supervision.switch("prefill-1", "decode", 5.0)
    world.turn()
    world.supervision = Supervision(world.saved, world.now)
    world.stubborn.clear()
    world.settle()
    asked = [each.member for each in world.done if isinstance(each, Switch)]
    assert asked == [world.alive["prefill-1"]] * 2
    assert world.serving("decode") == 2


def test_who_cannot_take_another_role_is_told_why() -> None:
    world = World(2, 1)
    world.settle()
    for name, role, said in (
        ("decode-0", "prefill", "only decode worker"),
        ("router-0", "decode", "no worker 'router-0'"),
        ("prefill-0", "router", "role must be one of"),
    ):
        with pytest.raises((ClusterError, ConfigError), match=said):
            world.supervision.switch(name, role, 1.0)
    world.stubborn.add("prefill-1")
    world.supervision.drain("prefill-1", 5.0)
    with pytest.raises(ClusterError, match="does not serve"):
        world.supervision.switch("prefill-1", "decode", 1.0)
    config = msgspec.structs.replace(world.saved.config, prefill=RoleSection(gpus=2.0))
    other = Supervision(ClusterRecord.first(config), world.now)
    other.scale({"prefill": 2})
    for _ in range(3):
        other.tick(world.now)
        for member in other.members:
            other.observed(member.record.name, Sight.READY, world.now)
    with pytest.raises(ClusterError, match=r"has gpus 2.0, and a decode worker wants 0.0"):
        other.switch("prefill-0", "decode", 1.0)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_restart_replaces_all_and_never_serves_with_less(count: int) -> None:
    world = World(count, count)
    world.settle()
    config = msgspec.structs.replace(world.saved.config, served_name="new")
    world.supervision.restart(config)
    world.settle(lambda: min(world.serving("prefill"), world.serving("decode")) >= count)
    workers = [member for member in world.alive.values() if member.role != "router"]
    assert len(workers) == 2 * count
    assert {member.revision for member in workers} == {2}
    assert world.alive["router-0"].incarnation == 1
    assert world.saved.config.served_name == "new"


def test_without_room_for_one_more_an_old_one_makes_room() -> None:
    world = World(2, 2, room=5)
    world.settle()
    world.supervision.restart(world.saved.config)
    world.settle(lambda: min(world.serving("prefill"), world.serving("decode")) >= 1, turns=1000)
    assert {member.revision for member in world.alive.values() if member.role != "router"} == {2}


def test_the_only_one_is_not_let_go_without_a_successor() -> None:
    world = World(1, 1, room=3)
    world.settle()
    world.supervision.restart(world.saved.config)
    for _ in range(int(3 * NO_ROOM_SECONDS / 0.2)):
        world.turn()
        assert (world.serving("prefill"), world.serving("decode")) == (1, 1)
    assert not world.supervision.settled
    world.room = 9
    world.die("router-0")
    world.settle()


def test_nothing_old_is_made_again_once_a_restart_has_begun() -> None:
    world = World(3)
    world.settle()
    world.supervision.restart(world.saved.config)
    world.turn()
    world.die("prefill-1")
    world.settle()
    made = [each.member for each in world.done if isinstance(each, Create)]
    assert {member.revision for member in made} == {2}
    assert world.serving("prefill") == 3


def test_a_new_supervisor_goes_on_where_the_last_one_died() -> None:
    world = World(2)
    world.settle()
    world.stubborn.add("prefill-0")
    world.supervision.drain("prefill-0", 5.0)
    world.supervision.scale({"decode": 2})
    world.turn()
    world.die("decode-0")
    world.supervision = Supervision(world.saved, world.now)
    assert [type(each) for each in world.supervision.tick(world.now)] == [Save], "nobody was looked for yet"
    world.stubborn.clear()
    world.settle()
    assert world.names() == ["decode-0", "decode-1", "prefill-1", "router-0"]
    assert world.done.count(Drain("prefill-0", 5.0)) == 2, "asked again, for it may not have heard"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_happens_it_comes_to_what_is_wanted(data: st.DataObject) -> None:
    world = World(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)))
    highest = 0
    for _ in range(data.draw(st.integers(0, 25))):
        match data.draw(st.sampled_from(["turn", "die", "scale", "drain", "switch", "restart", "supervisor", "slow"])):
            case "turn":
                world.turn()
            case "die" if world.alive:
                world.die(data.draw(st.sampled_from(world.names())))
            case "slow" if world.alive:
                world.seen[data.draw(st.sampled_from(world.names()))] = Sight.STARTING
            case "scale":
                world.supervision.scale(
                    {data.draw(st.sampled_from(["prefill", "decode"])): data.draw(st.integers(1, 4))}
                )
            case "drain":
                name = data.draw(st.sampled_from(["prefill-0", "decode-1", "prefill-2"]))
                with suppress(ClusterError):  # it is the last that serves, or is not there
                    world.supervision.drain(name, 1.0)
            case "switch":
                name, role = (
                    data.draw(st.sampled_from(["prefill-0", "decode-1", "prefill-2"])),
                    data.draw(st.sampled_from(["prefill", "decode"])),
                )
                with suppress(ClusterError):
                    world.supervision.switch(name, role, 1.0)
            case "restart":
                world.supervision.restart(world.saved.config)
            case "supervisor":
                world.supervision = Supervision(world.saved, world.now)
        lives = [each.member.incarnation for each in world.done if isinstance(each, Create | Switch)]
        lives = list(dict.fromkeys(lives))  # a later supervisor asks again
        assert lives == sorted(set(lives)), "each life has its own, and they grow"
        highest = max([highest, *lives])
    for name in world.seen:
        world.seen[name] = Sight.READY
    world.settle(turns=3000)
    for role, count in world.saved.wanted.items():
        assert sum(member.role == role for member in world.alive.values()) == count
