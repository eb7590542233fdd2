"""Breadth-first search over every state that a test world can reach."""

from __future__ import annotations

import gc
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from handoff_choices import check_drained, faults, progress
from handoff_pieces import Action, Fault
from handoff_world import World

from kv_transfer.imports import ImportBook
from kv_transfer.lease import LeaseBook
from protocol.errors import KVFerryError
from protocol.transitions import Tracker

Record = TypeVar("Record")


@contextmanager
def uncollected() -> Iterator[None]:
    """Every state is kept to the end, so that looking for garbage among them is a fifth of the work, for nothing."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@uncollected()
def explore(world: World, limit: int) -> tuple[int, set[str]]:
    """Visit every state once, and check that each can drain with no more faults.

    Returns:
        How many states there are, and how the requests can end.

    Raises:
        Fault: something forbidden happened, or cannot drain; names the way there.
    """
    numbers = {fingerprint(world): 0}
    came_from: list[tuple[int, Action | None]] = [(0, None)]
    drains_to: dict[int, list[int]] = {}
    ends: list[int] = []
    outcomes: set[str] = set()
    frontier = deque([(0, world)])
    while frontier:
        number, here = frontier.popleft()
        sound = progress(here)
        if not sound and here.deadline() is not None:
            sound = [("wait", None)]
        if not sound:
            check_drained(here)
            ends.append(number)
            outcomes |= {request.state for request in here.requests.values()}
        for action in (*sound, *faults(here)):
            there = copy_world(here)
            try:
                there.apply(action)
            except (Fault, KVFerryError) as error:
                raise Fault(f"{error}: after {way(came_from, number)}, {action}") from error
            known = numbers.setdefault(fingerprint(there), len(came_from))
            if known == len(came_from):
                came_from.append((number, action))
                frontier.append((known, there))
                assert len(came_from) <= limit, "the search is larger than planned"
            if action in sound:
                drains_to.setdefault(known, []).append(number)
    drained, todo = set(ends), list(ends)
    while todo:
        for before in drains_to.get(todo.pop(), []):
            if before not in drained:
                drained.add(before)
                todo.append(before)
    stuck = next((number for number in range(len(came_from)) if number not in drained), None)
    if stuck is not None:
        raise Fault(f"cannot drain: after {way(came_from, stuck)}")
    return len(came_from), outcomes


def way(came_from: list[tuple[int, Action | None]], number: int) -> str:
    steps = []
    while number:
        number, action = came_from[number]
        steps.append(str(action))
    return ", ".join(reversed(steps))


def fingerprint(world: World) -> tuple[Any, ...]:
    """Everything that decides what can happen from here; times count from now."""
    now = world.now

    def left(time: float | None) -> float | None:
        return None if time is None else time - now

    leases = tuple(
        (
            key,
            each.reader,
            each.state,
            tuple(each.source),
            each.begun,
            each.shipped_layers,
            tuple(each.in_flight),
            each.next_block,
            left(each.expires),
        )
        for key, each in world.leases._leases.items()
    )
    imports = tuple(
        (
            key,
            each.prefill,
            each.state,
            each.landed_blocks,
            each.landed_bytes,
            each.handover is None,
            left(each.renew_at),
            left(each.expires),
        )
        for key, each in world.imports._imports.items()
    )
    parked = tuple(
        (key, sender, type(each.message), left(each.expires))
        for key, lot in world.leases._parking._lots.items()
        for sender, each in lot.items()
    )
    buried = frozenset(world.leases._tombstones._graves), frozenset(world.imports._tombstones._graves)
    bag = tuple(sorted(map(hash, map(brief, world.bag))))
    pools = tuple(
        (
            tuple(sorted(pool.holds.items())),
            tuple((block, *sorted(layers.items())) for block, layers in sorted(pool.content.items())),
            tuple(sorted(pool.generation.items())),
        )
        for pool in world.pools.values()
    )
    ships = tuple((ship_id, run.done, run.stopping) for ship_id, run in world.ships.items())
    requests = tuple(world.requests.values())
    rest = (
        tuple(world.peers.values()),
        tuple(world.budgets.items()),
        tuple(world.jobs.items()),
        tuple(world.begun.items()),
    )
    return (
        leases,
        imports,
        parked,
        buried,
        bag,
        pools,
        ships,
        tuple(world.windows.items()),
        requests,
        rest,
        tuple(world.queue),
        frozenset(world.decoding),
    )


def brief(item: Action) -> tuple[Any, ...]:
    """An item under way; messages by what tells them apart, for their texts and times decide nothing."""
    if item[0] == "peer":
        return (*item[:3], type(item[3]), item[3].key)
    return tuple(type(part) if isinstance(part, Exception) else part for part in item)


def copy_world(world: World) -> World:
    twin = object.__new__(World)
    twin.__dict__.update(world.__dict__)
    own = twin.__dict__
    for name in (
        "requests",
        "jobs",
        "begun",
        "queue",
        "ships",
        "windows",
        "grants",
        "bag",
        "budgets",
        "ends",
        "decoding",
    ):
        own[name] = own[name].copy()
    twin.peers = dict(world.peers)
    twin.pools = {side: pool.copy() for side, pool in world.pools.items()}
    twin.leases = copy_leases(world.leases)
    twin.imports = copy_imports(world.imports)
    return twin


def copy_record(record: Record) -> Record:
    """As ``dataclasses.replace`` with nothing to replace, at a fraction of its price."""
    twin = object.__new__(type(record))
    for name in record.__dataclass_fields__:  # type: ignore[attr-defined]
        object.__setattr__(twin, name, getattr(record, name))
    return twin


def copy_tracker(tracker: Tracker[Any, Any]) -> Tracker[Any, Any]:
    twin = tracker.table.start(tracker.key)
    twin.state = tracker.state
    return twin


def copy_leases(book: LeaseBook) -> LeaseBook:
    twin = type(book)()
    twin._next_ship_id = book._next_ship_id
    for key, each in book._leases.items():
        twin._leases[key] = copied = copy_record(each)
        copied.tracker = copy_tracker(each.tracker)
        copied.source, copied.in_flight = list(each.source), dict(each.in_flight)
    twin._parking._lots = {key: dict(lot) for key, lot in book._parking._lots.items()}
    twin._parking._count = book._parking._count
    twin._tombstones._graves = OrderedDict(book._tombstones._graves)
    return twin


def copy_imports(book: ImportBook) -> ImportBook:
    twin = type(book)()
    for key, each in book._imports.items():
        copied = copy_record(each)
        copied.tracker = copy_tracker(each.tracker)
        twin._imports[key] = copied
    twin._by_ticket = {ticket: twin._imports[each.key] for ticket, each in book._by_ticket.items()}
    twin._tombstones._graves = OrderedDict(book._tombstones._graves)
    return twin
