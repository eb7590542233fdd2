"""A small world around the two books: two pools, a transport, a wire that loses and reorders, a router, and crashes.

Every choice is an action, so the same world serves a random walk and an exhaustive search. The world is the harshest
that the instructions allow: a block without a holder is overwritten at once, a ship copies block by block and may go on
after it was told to stop, a window may be written until it is quiesced, and whatever is under way arrives in any order
or never.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from handoff_choices import FAULTS
from handoff_pieces import METHODS, TTL, Action, Pool, Request, ShipRun, WindowRun, require

from kv_transfer import instructions as do
from kv_transfer.imports import ImportBook
from kv_transfer.lease import LeaseBook
from kv_transfer.lease_state import Layers
from protocol.errors import ChannelLost, Preempted, TicketRejected
from protocol.ids import Peer, RequestKey
from protocol.layout import KVLayout
from protocol.messages import PrefillAddress, Refuse


class World:
    """One prefill worker, one decode worker, a router, and all that lies between them."""

    def __init__(
        self,
        requests: dict[str, Request],
        budgets: dict[str, int],
        *,
        lease_book: Callable[[], LeaseBook] = LeaseBook,
        import_book: Callable[[], ImportBook] = ImportBook,
        pools: tuple[int, int] = (4, 4),
        attempts: int = 2,
        layered: bool = False,
        sizes: tuple[int, int] = (1, 1),
    ) -> None:
        self.make = {"P": lease_book, "D": import_book}
        self.peers = {"P": Peer("p", 10), "D": Peer("d", 10)}
        self.leases, self.imports = lease_book(), import_book()
        self.pools = {"P": Pool(pools[0]), "D": Pool(pools[1])}
        self.size = sizes[0]
        self.layout = KVLayout(num_layers=2, kv_heads=1, head_dim=1, block_size=sizes[1], dtype="float32")
        self.now = 0.0
        self.requests = dict(requests)
        self.budgets = {**dict.fromkeys(FAULTS, 0), **budgets}
        self.attempts = attempts
        self.layered = layered
        self.bag: list[Action] = []
        self.jobs: dict[RequestKey, tuple[Peer | None, tuple[int, ...]]] = {}
        self.begun: dict[RequestKey, int] = {}
        self.queue: dict[RequestKey, PrefillAddress] = {}
        self.ships: dict[int, ShipRun] = {}
        self.windows: dict[bytes, WindowRun] = {}
        self.grants: dict[RequestKey, tuple[int, tuple[int, ...]]] = {}
        self.decoding: set[RequestKey] = set()
        self.ends: defaultdict[tuple[str, RequestKey], int] = defaultdict(int)
        self.tickets = 0

    # What happens.

    def apply(self, action: Action) -> None:
        """Let it happen, then check everything."""
        kind, subject = action
        if kind in FAULTS:
            self.budgets[kind] -= 1
        getattr(self, f"_do_{kind}")(subject)
        self.leases.check_integrity()
        self.imports.check_integrity()

    # The router.

    def _do_start(self, name: str) -> None:
        self.requests[name] = replace(self.requests[name], state="live")
        key = RequestKey(name, self.requests[name].attempt)
        self.bag += [("router", "P", "prefill", key, self.peers["D"]), ("router", "D", "reserve", key, self.peers["P"])]

    def _do_cancel(self, name: str) -> None:
        key = RequestKey(name, self.requests[name].attempt)
        self.requests[name] = replace(self.requests[name], state="over")
        self.bag += [("router", side, "cancel", key, self.peers[side]) for side in ("P", "D")]

    def _failed(self, key: RequestKey, handed_over: bool) -> None:
        request = self.requests[key.request_id]
        if request.attempt != key.attempt or request.state == "over" or (handed_over and request.state == "done"):
            return
        require(request.state != "done", f"{key} is reported as failed after its commit")
        self._do_cancel(key.request_id)
        if key.attempt + 1 < self.attempts:
            self.requests[key.request_id] = replace(request, attempt=key.attempt + 1, state="new")

    # The wire, time and crashes.

    def _do_deliver(self, item: Action) -> None:
        self.bag.remove(item)
        channel, side, what, *rest = item
        if channel == "router":
            getattr(self, f"_on_{what}")(side, *rest)
        elif channel == "peer":
            self._run(side, getattr(self._book(side), METHODS[type(rest[0])])(what, rest[0], self.now))
        elif what == "landed":
            self._land(*rest)
        else:
            fails = what == "ship_failed" and self.leases.is_open(rest[0])
            self._run(side, getattr(self._book(side), what)(*rest, self.now))
            untold = fails and self.requests[rest[0].request_id].runs(rest[0])
            require(not untold, f"a ship of {rest[0]} failed, and the router is not told")

    def _land(self, ticket: bytes, blocks: tuple[int, ...], layers: range) -> None:
        """The receiver's book adds up as it reports: a block is told of with the last of its layers, in any order."""
        window = self.windows.get(ticket)
        if window is None:
            return
        fresh = {(block, layer) for block in blocks for layer in layers}
        self.windows[ticket] = window = replace(window, reported=window.reported | fresh)
        whole = window.whole(blocks, range(self.layout.num_layers))
        nbytes = len(fresh) * self.layout.layer_bytes
        self._run("D", self.imports.landed(ticket, whole, nbytes, self.now))

    def _do_drop(self, item: Action) -> None:
        self.bag.remove(item)

    def _do_duplicate(self, item: Action) -> None:
        self.bag.append(item)

    def _do_forge(self, item: Action) -> None:
        """The same message from an incarnation that is not the one concerned: it is refused, or changes nothing."""
        _, side, sender, message = item
        forger = Peer(sender.name, sender.incarnation - 5)
        result = getattr(self._book(side), METHODS[type(message)])(forger, message, self.now)
        told = [each for each in result if not (isinstance(each, do.Send) and isinstance(each.message, Refuse))]
        require(not told and all(each.peer == forger for each in result), f"a stale {message} led to {result}")

    def _do_time(self, step: float | None) -> None:
        due = self.deadline()
        assert due is not None
        self.now = max(self.now, due) if step is None else self.now + step
        self._run("P", self.leases.tick(self.now))
        self._run("D", self.imports.tick(self.now))

    _do_wait = _do_time

    def _do_crash(self, side: str) -> None:
        lost = self.peers[side]
        self.peers[side] = Peer(lost.name, lost.incarnation + 1)
        self.bag = [item for item in self.bag if (item[0], item[1]) != ("local", side)]
        self.pools[side] = Pool(self.pools[side].size)
        if side == "P":
            for run in self.ships.values():
                self._break_off(run)
            self.leases = self.make["P"]()
            self.jobs, self.begun, self.ships = {}, {}, {}
            self.bag.append(("note", "D", "prefill_lost", lost))
        else:
            self.imports = self.make["D"]()
            self.queue, self.windows, self.grants, self.decoding = {}, {}, {}, set()
            self.ends = defaultdict(int)
            self.bag.append(("note", "P", "reader_lost", lost))

    # The prefill worker.

    def _on_prefill(self, side: str, key: RequestKey, reader: Peer) -> None:
        tokens = self.requests[key.request_id].tokens
        self._run("P", self.leases.open(key, reader, None, tokens, self.size, TTL, self.now))
        if self.leases.is_open(key):
            self.jobs[key] = (reader, ())

    def _do_compute(self, key: RequestKey) -> None:
        (block,) = self.pools["P"].take(("table", key), 1)
        self._write(key, block, range(self.layout.num_layers))
        self._computed(key, block)

    def _do_begin(self, key: RequestKey) -> None:
        """A step computes the first layer of the next block, and goes on."""
        (block,) = self.pools["P"].take(("table", key), 1)
        self._write(key, block, range(1))
        self.begun[key] = block
        self._run("P", self.leases.computed(key, [block], self.now, layers=Layers(1, self.layout)))

    def _do_complete(self, key: RequestKey) -> None:
        """The step computes the other layers; if nobody wants them any more, it ends only now."""
        block = self.begun.pop(key)
        self._write(key, block, range(1, self.layout.num_layers))
        if self.jobs[key][0] is None:
            self._leave_step("P", key)
        else:
            self._computed(key, block)

    def _write(self, key: RequestKey, block: int, layers: range) -> None:
        pool = self.pools["P"]
        read = any(run.reads(block, layers) for run in self.ships.values())
        require(not read, f"{key} writes block {block} while a ship reads it")
        require(pool.held_by(block, ("table", key)), f"{key} computes in block {block}, which is not its own")
        pool.write(block, layers, self._tokens(key, len(self.jobs[key][1]), self.size))

    def _computed(self, key: RequestKey, block: int) -> None:
        reader, blocks = self.jobs[key]
        self.jobs[key] = (reader, (*blocks, block))
        self._run("P", self.leases.computed(key, [block], self.now))
        if key in self.jobs and (len(blocks) + 1) * self.size >= self.requests[key.request_id].tokens:
            del self.jobs[key]
            self.pools["P"].drop(("table", key))
            self._run("P", self.leases.finished(key, 1, self.now))

    def _do_give_up(self, key: RequestKey) -> None:
        self._run("P", self.leases.fail(key, Preempted("the pool is full"), self.now))

    # The decode worker.

    def _on_reserve(self, side: str, key: RequestKey, prefill: Peer) -> None:
        self.queue[key] = PrefillAddress(peer=prefill, endpoint="p")
        self._run("D", self.imports.waiting(key, self.queue[key], TTL, self.now))

    def _do_reserve(self, key: RequestKey) -> None:
        prefill = self.queue.pop(key)
        blocks = self.pools["D"].take(("import", key), self.wanted(key))
        generations = tuple(self.pools["D"].generation[block] for block in blocks)
        self.tickets += 1
        ticket = self.tickets.to_bytes(16)
        request = self.requests[key.request_id]
        self.ends["open", key] += 1
        opened = self.imports.open(
            key,
            prefill,
            request.first_block,
            blocks,
            generations,
            request.tokens,
            self.layout,
            ("d",),
            ticket,
            TTL,
            self.now,
        )
        self.grants[key] = (request.first_block, blocks)
        self._run("D", opened)

    def _do_decode(self, key: RequestKey) -> None:
        """The committed sequence runs to its end; until here nobody may have touched its blocks."""
        first, blocks = self.grants[key]
        for logical, block in zip(itertools.count(first), blocks):
            require(self._holds(block, key, logical), f"{key} decodes on wrong bytes")
        self.decoding.discard(key)
        self.pools["D"].drop(("table", key))

    def _on_cancel(self, side: str, key: RequestKey, peer: Peer) -> None:
        self._leave_step(side, key)
        self._run(side, self._book(side).cancel(key, self.now))

    # The transport.

    def _do_step(self, ship_id: int) -> None:
        run = self.ships[ship_id]
        ship, at = run.ship, run.done
        target, generation = ship.target_blocks[at], ship.generations[at]
        window = self.windows.get(ship.ticket)
        if window is None or (target, generation) not in zip(window.blocks, window.generations, strict=True):
            del self.ships[ship_id]
            self.bag.append(("local", "P", "ship_failed", ship.key, ship_id, TicketRejected("no such window")))
            return
        written = self.pools["D"]
        held = written.held_by(target, ("import", window.key), ("quarantine", window.key))
        require(held, f"{ship.key} writes block {target}, which is not its own")
        require(written.generation[target] == generation, f"{ship.key} writes another life of block {target}")
        size = self.layout.block_size
        for layer in run.layers:
            require((target, layer) not in window.written, f"{ship.key} writes layer {layer} of block {target} twice")
            moved = [self._read(ship, token, layer) for token in ship.tokens[at * size : (at + 1) * size]]
            written.write(target, [layer], tuple(moved))
        fresh = {(target, layer) for layer in run.layers}
        self.windows[ship.ticket] = replace(window, written=window.written | fresh)
        self.ships[ship_id] = replace(run, done=at + 1)
        if at + 1 == len(ship.target_blocks):
            del self.ships[ship_id]
            nbytes = (at + 1) * len(run.layers) * self.layout.layer_bytes
            self.bag.append(("local", "D", "landed", ship.ticket, ship.target_blocks, run.layers))
            self.bag.append(("local", "P", "shipped", ship.key, ship_id, nbytes, ship.finishes))

    def _read(self, ship: do.Ship, token: int, layer: int) -> tuple[str, int]:
        pool = self.pools["P"]
        source = ship.source_blocks[token // self.size - ship.tokens.start // self.size]
        held = pool.held_by(source, ("lease", ship.key), ("quarantine", ship.key))
        require(held, f"{ship.key} ships a free block")
        require(layer in pool.content.get(source, {}), f"{ship.key} ships a layer that is not computed")
        return pool.content[source][layer][token % self.size]

    def _do_stop(self, ship_id: int) -> None:
        run = self.ships.pop(ship_id)
        self._break_off(run)
        self.bag.append(("local", "P", "ship_failed", run.ship.key, ship_id, ChannelLost("stopped")))

    _do_break = _do_stop

    def _do_unanswer(self, item: Action) -> None:
        """Every byte of a ship has landed, and its answer is lost with the connection."""
        self.bag.remove(item)
        _, _, _, key, ship_id, *_ = item
        self.bag.append(("local", "P", "ship_failed", key, ship_id, ChannelLost("no answer")))

    def _break_off(self, run: ShipRun) -> None:
        if run.done and run.ship.ticket in self.windows:
            self.bag.append(("local", "D", "broken", run.ship.ticket, ChannelLost("half a ship")))

    def _do_quiesce(self, ticket: bytes) -> None:
        del self.windows[ticket]
        self.bag.append(("local", "D", "quiesced", ticket))

    # The shells.

    def _run(self, side: str, instructions: list[do.Instruction]) -> None:
        for each in instructions:
            match each:
                case do.Send(peer, message):
                    # A decode worker is known by its connection, so another incarnation's mail goes nowhere.
                    if side == "D" or peer == self.peers["D"]:
                        self.bag.append(("peer", "D" if side == "P" else "P", self.peers[side], message))
                case do.Failed(key, handed_over=handed_over):
                    self._failed(key, handed_over)
                case do.Ship():
                    self.ships[each.ship_id] = ShipRun(each)
                case do.StopShips(_, ticket):
                    for ship_id, run in self.ships.items():
                        if run.ship.ticket == ticket:
                            self.ships[ship_id] = replace(run, stopping=True)
                case do.OpenWindow(key, ticket, blocks, generations):
                    self.windows[ticket] = WindowRun(key, blocks, generations)
                case do.CloseWindow(_, ticket):
                    self.windows[ticket] = replace(self.windows[ticket], closing=True)
                case _:
                    self._account(side, each)

    def _account(self, side: str, instruction: do.Instruction) -> None:
        pool = self.pools[side]
        match instruction:
            case do.Hold(key, blocks):
                pool.add(("lease", key), blocks)
            case do.Quarantine(key):
                self._leave_step(side, key)
                pool.move(("lease" if side == "P" else "import", key), ("quarantine", key))
            case do.Release(key):
                self._leave_step(side, key)
                pool.drop(("lease", key), ("quarantine", key))
            case do.FreeBlocks(key):
                self.ends["end", key] += 1
                pool.drop(("import", key), ("quarantine", key))
            case do.Commit(key):
                self._commit(key)

    def _leave_step(self, side: str, key: RequestKey) -> None:
        if side == "D" or key not in self.jobs:
            return
        if key in self.begun:
            # The step writes its blocks to the end.
            self.jobs[key] = (None, self.jobs[key][1])
            return
        del self.jobs[key]
        self.pools["P"].drop(("table", key))

    def _commit(self, key: RequestKey) -> None:
        self.ends["end", key] += 1
        pool = self.pools["D"]
        first, blocks = self.grants[key]
        require(all(window.key != key for window in self.windows.values()), f"{key} commits with its window open")
        for logical, block in zip(itertools.count(first), blocks):
            require(pool.held_by(block, ("import", key)), f"{key} commits a block that it does not own")
            require(self._holds(block, key, logical), f"{key} commits wrong bytes")
        pool.move(("import", key), ("table", key))
        self.decoding.add(key)
        request = self.requests[key.request_id]
        if request.runs(key):
            self.requests[key.request_id] = replace(request, state="done")

    def _holds(self, block: int, key: RequestKey, logical: int) -> bool:
        value = self._tokens(key, logical, self.layout.block_size)
        return self.pools["D"].content.get(block) == dict.fromkeys(range(self.layout.num_layers), value)

    def _book(self, side: str) -> Any:
        return self.leases if side == "P" else self.imports

    def wanted(self, key: RequestKey) -> int:
        request = self.requests[key.request_id]
        return self.layout.blocks_for(request.tokens) - request.first_block

    def _tokens(self, key: RequestKey, index: int, size: int) -> tuple[tuple[str, int], ...]:
        """What a logical block holds, by its size."""
        last = self.requests[key.request_id].tokens
        return tuple((key.request_id, token) for token in range(index * size, min(last, (index + 1) * size)))

    def deadline(self) -> float | None:
        """When time itself next does something."""
        times = self.leases.deadline(), self.imports.deadline()
        return min((time for time in times if time is not None), default=None)
