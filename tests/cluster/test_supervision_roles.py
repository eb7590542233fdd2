"""Workers that take the other role in their process."""

from __future__ import annotations

import msgspec
import pytest
from world import World

from cluster.config import RoleSection
from cluster.member import Sight
from cluster.supervision import (
    KILL_AFTER_SECONDS,
    ClusterRecord,
    Create,
    Drain,
    Kill,
    Supervision,
    Switch,
)
from protocol.errors import ClusterError, ConfigError


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
