"""What may happen next in the handoff's test world."""

from __future__ import annotations

from typing import TYPE_CHECKING

from handoff_pieces import TTL, Action

if TYPE_CHECKING:
    from handoff_world import World

FAULTS = ("drop", "duplicate", "forge", "break", "cancel", "crash", "time")


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
    found += [("cancel", name) for name, each in world.requests.items() if each.state == "live" and spend["cancel"]]
    found += [("crash", side) for side in ("P", "D") if spend["crash"]]
    if spend["time"] and world.deadline() is not None:
        found += [("time", None), ("time", TTL)]
    return found
