"""All workers by row, one for each name: what placement reckons with, kept between requests.

Each has a lane of plain numbers, which is written with each event; who looks at many workers asks for all lanes as
columns, and what was written since is taken over then.

Life cycle of a row: allotted to a name when it is first seen, refreshed when its worker has beaten, written anew with
each piece of work that is sent there or over, freed when the name is forgotten.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from protocol.ids import Peer, Role
from router.account import Account
from router.columns import FIRST_ROWS, Bools, Columns, Rows
from router.lane import Lane
from router.links import Links
from router.pairing import kind, unpaired
from router.recent_work import RecentWork
from router.registry import Worker
from router.role_correction import RoleCorrection
from router.role_pace import ASSUMED, RolePace

Work = Literal["prefill", "decode", "local"]
"""What is predicted of a worker: its role's, or prompts on decode workers."""

SMALL = 64
"""Rows up to which workers are looked at one by one."""
STEP_TOKENS = 512
"""Tokens that a step is taken to have room for where a worker does not tell."""


class Fleet:
    """The lanes, and what all of them have in common. What belongs to rows that are free is never looked at.

    Args:
        model: that workers must serve.
        slow_start: seconds until a worker that has just joined is trusted like the others.

    Attributes:
        workers, names: by row; None and "" where it is free.
        lanes: by row.
        prefill, decode: which rows take new work of that kind.
        prefills: which of them are decode workers that compute prompts beside it.
        common: by role, and of prompts that decode workers compute, what measured times come to, by the predicted ones.
        seeds: of draws, by the workers' names.
        newest: the last time at which one joined.
        recent: prompts that prefill workers were sent lately.
        links: between workers.
    """

    def __init__(self, model: str, slow_start: float = 0.0) -> None:
        self._model = model
        self._slow_start = slow_start
        self._begun: float | None = None
        self.newest = -np.inf
        self.recent = RecentWork(FIRST_ROWS)
        self.links = Links(FIRST_ROWS)
        self.workers: list[Worker | None] = []
        self.lanes: list[Lane] = []
        self._columns = Columns()
        self._written: set[int] = set()
        self._rows: dict[str, int] = {}
        self.prefill: Bools = np.zeros(FIRST_ROWS, dtype=bool)
        self.decode: Bools = np.zeros(FIRST_ROWS, dtype=bool)
        self.prefills: Bools = np.zeros(FIRST_ROWS, dtype=bool)
        self.seeds = np.zeros(FIRST_ROWS, dtype=np.uint64)
        self.common: dict[Work, RoleCorrection] = {work: RoleCorrection() for work in get_args(Work)}
        self._paces: dict[Role, RolePace] = {role: RolePace(line) for role, line in ASSUMED.items()}
        self._able: dict[str, Rows] = {}
        self._takers: dict[str, list[int]] = {}
        self._sizes: dict[int, int] | None = None
        self._names: tuple[str, ...] | None = None
        self._fits: dict[tuple[int, int], bool] = {}
        self._kinds: list[int] = []

    def __len__(self) -> int:
        return len(self.prefill)

    @property
    def columns(self) -> Columns:
        """All lanes as they are now; good until the next event."""
        if self._written:
            self._columns.write(self.lanes, self._written)
            self._written.clear()
        return self._columns

    @property
    def names(self) -> tuple[str, ...]:
        """Of the workers, by row."""
        if self._names is None:
            self._names = tuple("" if worker is None else worker.peer.name for worker in self.workers)
        return self._names

    def row(self, name: str) -> int:
        """The row of a worker that was seen."""
        return self._rows[name]

    def find(self, peer: Peer) -> int | None:
        """The row of exactly this incarnation."""
        row = self._rows.get(peer.name)
        worker = None if row is None else self.workers[row]
        return row if worker is not None and worker.peer == peer else None

    def able(self, role: Role) -> Rows:
        """Rows of that role that take work, in order."""
        rows = self._able.get(role)
        if rows is None:
            rows = self._able[role] = np.flatnonzero(self.prefill if role == "prefill" else self.decode)
        return rows

    def takers(self, role: Role) -> list[int]:
        """The same as a list."""
        rows = self._takers.get(role)
        if rows is None:
            rows = self._takers[role] = self.able(role).tolist()
        return rows

    @property
    def small(self) -> bool:
        """Whether there are so few that each is soon looked at."""
        return len(self.workers) <= SMALL

    def block_sizes(self) -> dict[int, int]:
        """Bits of the rows that take work, by their block size."""
        if self._sizes is None:
            self._sizes = {}
            for row in np.flatnonzero(self.prefill | self.decode).tolist():
                size = int(self.lanes[row].block_size)
                self._sizes[size] = self._sizes.get(size, 0) | 1 << row
        return self._sizes

    def fit(self, prefill: int, decode: int) -> bool:
        """Whether the workers of two rows can serve a request together."""
        if not self._kinds:
            known: dict[object, int] = {}
            for worker in self.workers:
                self._kinds.append(known.setdefault(worker and kind(worker), len(known)))
            self._fits.clear()
        kinds = self._kinds[prefill], self._kinds[decode]
        found = self._fits.get(kinds)
        if found is None:
            here, there = self.workers[prefill], self.workers[decode]
            assert here is not None, "it takes work"
            assert there is not None, "it takes work"
            found = self._fits[kinds] = unpaired(here, there) is None
        return found

    def see(self, workers: Sequence[Worker], now: float) -> list[str]:
        """Take in all known workers; returns the names that are not known any more."""
        rows, known = self._rows, self.workers
        if self._begun is None and workers:
            self._begun = now
        for worker in workers:
            row = rows.get(worker.peer.name)
            if row is None:
                row = self._allot(worker.peer.name)
            if known[row] is not worker:
                self._refresh(row, worker, now)
        if len(rows) == len(workers):
            return []
        gone = [*rows.keys() - {worker.peer.name for worker in workers}]
        for name in gone:
            row = rows.pop(name)
            known[row] = None
            self._changed()
            self.prefill[row] = self.decode[row] = False
        return gone

    def see_again(self, worker: Worker, now: float) -> bool:
        """Take in a worker whose name has a row; False where it has none."""
        row = self._rows.get(worker.peer.name)
        if row is None:
            return False
        if self.workers[row] is not worker:
            self._refresh(row, worker, now)
        return True

    def send_prompt(self, row: int, tokens: float, prompt: int, now: float) -> None:
        """This router has just sent a prompt there, of which so many tokens are to be computed."""
        lane = self.lanes[row]
        lane.account.send(tokens, prompt, now)
        if self.prefill[row]:
            self.recent.add(row, tokens * lane.pace, now)
        lane.write_prompts()
        self._written.add(row)

    def claim(self, row: int, tokens: float) -> None:
        """What this router has just sent there will take room for so many tokens."""
        self.lanes[row].claimed += tokens
        self._written.add(row)

    def send_sequences(self, row: int, sequences: int) -> None:
        """This router has just sent sequences there."""
        lane = self.lanes[row]
        lane.account.own_sequences += sequences
        lane.write_sequences()
        self._written.add(row)

    def prompt_over(self, peer: Peer, tokens: float, prompt: int, now: float, *, computed: bool) -> None:
        """A prompt that this router had sent there is computed, or nobody wants it any more."""
        row = self.find(peer)
        if row is not None:
            lane = self.lanes[row]
            lane.account.over(tokens, prompt, now, computed=computed)
            lane.write_prompts()
            self._written.add(row)

    def sequence_over(self, peer: Peer) -> None:
        """A sequence that this router had sent there has ended."""
        row = self.find(peer)
        if row is not None:
            lane = self.lanes[row]
            if lane.account.own_sequences:
                lane.account.own_sequences -= 1
                lane.write_sequences()
                self._written.add(row)

    def correct(self, peer: Peer, work: Work, ratio: float, now: float) -> None:
        """What was predicted of a worker took ``ratio`` times as long.

        Most of that is its whole role's: load that came after the prediction, or steps that all take for longer than
        they tell. Were it each worker's own, equals would differ by noise, and the luckiest would get everything.
        """
        row = self.find(peer)
        if row is None:
            return
        self.common[work].correct(ratio, now)
        if work != "local":  # a decode worker's own is that of its other steps
            self.lanes[row].account.correct(ratio)
            self._write(row)

    def _allot(self, name: str) -> int:
        row = next((row for row, worker in enumerate(self.workers) if worker is None), len(self.workers))
        if row == len(self.workers):
            self.workers.append(None)
            self.lanes.append(Lane())
        if row >= len(self):
            nobody = np.zeros(len(self), dtype=bool)
            self.prefill = np.concatenate((self.prefill, nobody))
            self.decode = np.concatenate((self.decode, nobody))
            self.prefills = np.concatenate((self.prefills, nobody))
            self.seeds = np.concatenate((self.seeds, np.zeros_like(self.seeds)))
            self.recent.grow(len(self))
            self.links.grow(len(self))
            self._columns = Columns(len(self))
            self._written.update(range(len(self.lanes)))
        self._rows[name] = row
        self.seeds[row] = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        return row

    def _refresh(self, row: int, worker: Worker, now: float) -> None:
        before, load, profile, lane = self.workers[row], worker.load, worker.profile, self.lanes[row]
        if before is None or before.peer != worker.peer:
            # When all come at once none is newer than the others.
            first = self._begun is None or now - self._begun <= self._slow_start
            lane.joined = -np.inf if first else now
            self.newest = max(self.newest, lane.joined)
            lane.account = Account(faded=now)
            self.recent.forget(row)
            self.links.forget(row, now)
        self.workers[row] = worker
        account, heard = lane.account, before is None or before.load is not load
        able = worker.accepts_work and profile.model == self._model
        moved = able != bool(self.prefill[row] or self.decode[row])
        # Most heartbeats bring a profile that is the same, but another object.
        renewed = before is None or (before.profile is not profile and before.profile != profile)
        if moved and before is not None:
            account.come_back(load.steps)
        if moved or renewed:
            self._changed()
            self.links.know(row, profile)
            self.prefill[row] = able and profile.role == "prefill"
            self.decode[row] = able and profile.role == "decode"
            self.prefills[row] = profile.prefills
        size = profile.layout.block_size
        lane.room = (load.pool.free + load.pool.cached) * size
        lane.block_size = size
        lane.slots = profile.max_sequences or np.inf
        lane.empty = load.empty_slots
        lane.paced = bool(load.step_fixed or load.step_per_token)
        if heard:
            last = None if before is None or before.peer != worker.peer else before
            lane.waiting, lane.claimed = load.waiting_tokens, 0.0
            account.hear(load.waiting_tokens, load.running + load.waiting, now)
            self.links.hear(row, None if last is None else last.load, load, now)
            self._measure(account, worker, last, now)
        self._write(row)

    def _changed(self) -> None:
        self._sizes = self._names = None
        self._able.clear()
        self._takers.clear()
        self._kinds.clear()

    def _measure(self, account: Account, worker: Worker, before: Worker | None, now: float) -> None:
        role, load = worker.profile.role, worker.load
        pace, own = self._paces[role], (load.step_fixed, load.step_per_token)
        idle = not any(own) or (before is not None and before.load.steps == load.steps)
        account.fade(now, idle=idle)
        if idle:
            return
        tokens = load.step_mean_tokens or (
            worker.profile.step_tokens or STEP_TOKENS if role == "prefill" else max(1, load.running)
        )
        if pace.hear(own, tokens):
            for each, other in enumerate(self.workers):
                if other is not None:
                    self._write(each)
        account.measured(pace.slowness(own, tokens), load.steps)

    def _write(self, row: int) -> None:
        worker = self.workers[row]
        assert worker is not None, "it was seen"
        profile, paces = worker.profile, self._paces
        self.lanes[row].write(paces[profile.role].line, paces["prefill"].line[1], profile.step_tokens or STEP_TOKENS)
        self._written.add(row)
