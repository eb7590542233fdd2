"""What may happen next in the handoff's test world, and how it comes to rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from handoff_pieces import TTL, Action, Fault, require

if TYPE_CHECKING:
    from handoff_world import World

FAULTS = ("drop", "duplicate", "forge", "break", "unanswer", "cancel", "crash", "time")


def progress(world: World) -> list[Action]:
    """Actions that need no fault and no passing of time."""
    found: list[Action] = [("start", name) for name, each in world.requests.items() if each.state == "new"]
    found += [("deliver", item) for item in dict.fromkeys(world.bag)]
    for key in world.jobs:
        if key in world.begun:
            found.append(("complete", key))
        elif world.pools["P"].free:
            found.append(("begin" if world.layered else "compute", key))
        else:
            found.append(("give_up", key))
    found += [("decode", key) for key in world.decoding]
    space = len(world.pools["D"].free)
    found += [("reserve", key) for key in world.queue if world.wanted(key) <= space]
    found += [("step", ship_id) for ship_id in world.ships]
    found += [("stop", ship_id) for ship_id, run in world.ships.items() if run.stopping]
    found += [("quiesce", ticket) for ticket, window in world.windows.items() if window.closing]
    return found


def faults(world: World) -> list[Action]:
    """Actions that the budgets still allow."""
    spend = world.budgets
    losable = [item for item in dict.fromkeys(world.bag) if item[0] != "local"]
    between = [item for item in losable if item[0] == "peer"]
    found: list[Action] = []
    found += [("drop", item) for item in losable if spend["drop"]]
    found += [("duplicate", item) for item in between if spend["duplicate"]]
    found += [("forge", item) for item in between if spend["forge"]]
    found += [("break", ship_id) for ship_id in world.ships if spend["break"]]
    answers = [item for item in dict.fromkeys(world.bag) if item[0] == "local" and item[2] == "shipped"]
    found += [("unanswer", item) for item in answers if spend["unanswer"]]
    found += [("cancel", name) for name, each in world.requests.items() if each.state == "live" and spend["cancel"]]
    found += [("crash", side) for side in ("P", "D") if spend["crash"]]
    if spend["time"] and world.deadline() is not None:
        found += [("time", None), ("time", TTL)]
    return found


def drain(world: World, choose: Callable[[list[Action]], Action]) -> None:
    """No more faults: everything under way arrives, time passes, and nothing may be left."""
    for _ in range(5000):
        possible = progress(world)
        if possible:
            world.apply(choose(possible))
        elif world.deadline() is not None:
            world.apply(("wait", None))
        else:
            break
    else:
        raise Fault("the world does not drain")
    check_drained(world)


def check_drained(world: World) -> None:
    """Nothing is held, kept or under way, and each opened import has ended once."""
    require(world.leases.open_count == 0, "a lease is left")
    require(world.imports.open_count == 0, "an import is left")
    require(not world.ships and not world.windows, "a ship or a window is left")
    for side, pool in world.pools.items():
        require(not pool.holds, f"{side} still holds blocks: {pool.holds}")
    for (kind, key), count in world.ends.items():
        require(kind != "open" or world.ends.get(("end", key)) == count == 1, f"{key} opened once and ended otherwise")
