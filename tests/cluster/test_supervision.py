from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world import LIMIT, World

from cluster.member import MAX_PAUSE_SECONDS, STEADY_SECONDS, Sight
from cluster.supervision import (
    KILL_AFTER_SECONDS,
    NO_ROOM_SECONDS,
    Create,
    Drain,
    Kill,
    Save,
    Supervision,
    Switch,
)
from protocol.errors import ClusterError, ConfigError


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
    assert {name: member.lives for name, member in world.alive.items()} == {
        "decode-0": 3,
        "router-0": 2,
        "prefill-0": 1,
    }


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
    assert {member.lives for member in world.alive.values()} == {1}, "nobody has died"
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
    world = World(1, 1, room=2)
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


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_restart_replaces_all_and_never_serves_with_less(count: int) -> None:
    world = World(count, count)
    world.settle()
    config = msgspec.structs.replace(world.saved.config, served_name="new")
    world.supervision.restart(config)
    world.settle(lambda: min(world.serving("prefill"), world.serving("decode")) >= count)
    assert len(world.alive) == 2 * count + 1
    assert {member.revision for member in world.alive.values()} == {2}
    assert world.saved.config.served_name == "new"


def test_the_router_is_replaced_last_by_one_that_serves_before_it_leaves() -> None:
    world = World(2, 2)
    for name, former in (("router-1", "router-0"), ("router-0", "router-1")):
        world.settle()
        world.done.clear()
        world.supervision.restart(world.saved.config)
        world.settle(lambda: world.serving("router") >= 1)
        changed = [each for each in world.done if isinstance(each, Create | Drain)]
        assert changed[-1] == Drain(former, LIMIT)
        (made,) = (each for each in changed if isinstance(each, Create) and each.member.role == "router")
        assert made.member.name == name
        assert not any(isinstance(each, Create) for each in changed[changed.index(made) + 1 :])
        assert world.supervision.newest_router == name


def test_a_router_that_cannot_share_its_port_stays_until_it_ends() -> None:
    world = World()
    world.settle()
    world.supervision.restart(world.saved.config, ["router-0"])
    world.settle()
    assert world.alive["router-0"].incarnation == 1
    world.supervision = Supervision(world.saved, world.now)
    world.settle()
    assert world.alive["router-0"].incarnation == 1, "a later supervisor knows it too"
    world.die("router-0")
    world.settle()
    assert not world.alive["router-0"].fixed
    world.supervision.restart(world.saved.config)
    world.settle()
    assert world.names() == ["decode-0", "prefill-0", "router-1"]


def test_without_room_for_one_more_an_old_one_makes_room() -> None:
    world = World(2, 2, room=4)
    world.settle()
    world.supervision.restart(world.saved.config)
    world.settle(lambda: min(world.serving("prefill"), world.serving("decode")) >= 1, turns=1000)
    assert {member.revision for member in world.alive.values() if member.role != "router"} == {2}


def test_the_only_one_is_not_let_go_without_a_successor() -> None:
    world = World(1, 1, room=2)
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
