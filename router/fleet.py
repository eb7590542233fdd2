"""All workers as columns of numbers, a row for each name: what placement reckons with, kept between requests.

Life cycle of a row: allotted to a name when it is first seen, refreshed when its worker has beaten, written anew with
each piece of work that is sent there or over, freed when the name is forgotten.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from protocol.ids import Peer, Role
from router.account import Account, beyond_noise
from router.links import Links
from router.pairing import kind, unpaired
from router.recent_work import RecentWork
from router.registry import Worker
from router.role_correction import RoleCorrection
from router.role_pace import ASSUMED, RolePace

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Rows = NDArray[np.int64]
Work = Literal["prefill", "decode", "local"]
"""What is predicted of a worker: its role's, or prompts on decode workers."""

FIRST_ROWS = 32
STEP_TOKENS = 512
"""Tokens that a step is taken to have room for where a worker does not tell."""
SHORTEST = 1e-9
"""Seconds that a token takes at least."""
_COLUMNS = (
    "ahead",
    "sequences",
    "backlog",
    "since",
    "head",
    "fixed",
    "per_token",
    "pace",
    "step",
    "step_tokens",
    "beside",
    "room",
    "block_size",
    "joined",
    "waiting",
    "slots",
    "empty",
    "claimed",
    "paced",
    "correction",
)


class Fleet:
    """The columns; all of one length, and what belongs to rows that are free is never looked at.

    Attributes:
        workers, names: by row; None and "" where it is free.
        prefill, decode: which rows take new work of that kind.
        prefills: which of them are decode workers that compute prompts beside it.
        ahead, sequences: prompt tokens, and sequences, that are there or on their way.
        backlog: seconds that the tokens ahead take in all.
        since, head: when what is at the head of the queue began, and seconds of what was ahead then.
        fixed, per_token: seconds of a step whatever is in it, and of each token in it.
        pace: seconds of a token where there are many: the fixed part comes once for each step.
        step: seconds of a step with one sequence more than there are.
        step_tokens: that one has room for.
        beside: seconds of a prompt's token in a step that decodes: as prefill workers tell of theirs.
        room: tokens of the blocks that could be given out.
        block_size: of the layout.
        joined: when this incarnation was first seen; long ago for those that came with the first.
        common: by role, and of prompts that decode workers compute, what measured times come to, by the predicted ones.
        waiting: prompt tokens that the last heartbeat had.
        slots: sequences that it steps side by side; infinite where that is not told.
        empty: tokens that its sequences have room for already.
        paced: 1 where the worker has measured its steps, else 0.
        claimed: tokens of prompts and answers that this router has sent there since the last heartbeat.
        correction: what measured times came to, by those that its role's ``common`` one predicts.
        seeds: of draws, by the workers' names.
        newest: the last time at which one joined.
        recent: prompts that prefill workers were sent lately.
        links: between workers.
    """

    ahead: Floats
    sequences: Floats
    backlog: Floats
    since: Floats
    head: Floats
    fixed: Floats
    per_token: Floats
    pace: Floats
    step: Floats
    step_tokens: Floats
    beside: Floats
    room: Floats
    block_size: Floats
    joined: Floats
    waiting: Floats
    slots: Floats
    empty: Floats
    claimed: Floats
    paced: Floats
    correction: Floats

    def __init__(self, model: str, slow_start: float = 0.0) -> None:
        self._model = model
        self._slow_start = slow_start
        self._begun: float | None = None
        self.newest = -np.inf
        self.recent = RecentWork(FIRST_ROWS)
        self.links = Links(FIRST_ROWS)
        self.workers: list[Worker | None] = []
        self._accounts: list[Account] = []
        self._rows: dict[str, int] = {}
        self.prefill: Bools = np.zeros(FIRST_ROWS, dtype=bool)
        self.decode: Bools = np.zeros(FIRST_ROWS, dtype=bool)
        self.prefills: Bools = np.zeros(FIRST_ROWS, dtype=bool)
        self.seeds = np.zeros(FIRST_ROWS, dtype=np.uint64)
        # Rows that are free are reckoned with like all others, to no effect: 1 divides by nothing wrong.
        for name in _COLUMNS:
            setattr(self, name, np.ones(FIRST_ROWS))
        self.common: dict[Work, RoleCorrection] = {work: RoleCorrection() for work in get_args(Work)}
        self._paces: dict[Role, RolePace] = {role: RolePace(line) for role, line in ASSUMED.items()}
        self._able: dict[str, Rows] = {}
        self._sizes: dict[int, int] | None = None
        self._names: tuple[str, ...] | None = None
        self._fits: dict[tuple[int, int], bool] = {}
        self._kinds: list[int] = []

    def __len__(self) -> int:
        return len(self.prefill)

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

    def account(self, row: int) -> Account:
        """What is reckoned with of the worker of a row."""
        return self._accounts[row]

    def able(self, role: Role) -> Rows:
        """Rows of that role that take work, in order."""
        rows = self._able.get(role)
        if rows is None:
            rows = self._able[role] = np.flatnonzero(self.prefill if role == "prefill" else self.decode)
        return rows

    def block_sizes(self) -> dict[int, int]:
        """Bits of the rows that take work, by their block size."""
        if self._sizes is None:
            self._sizes = {}
            for row in np.flatnonzero(self.prefill | self.decode).tolist():
                size = int(self.block_size[row])
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
        self._accounts[row].send(tokens, prompt, now)
        if self.prefill[row]:
            self.recent.add(row, tokens * float(self.pace[row]), now)
        self._write_prompts(row)

    def claim(self, row: int, tokens: float) -> None:
        """What this router has just sent there will take room for so many tokens."""
        self.claimed[row] += tokens

    def send_sequences(self, row: int, sequences: int) -> None:
        """This router has just sent sequences there."""
        self._accounts[row].own_sequences += sequences
        self._write_sequences(row)

    def prompt_over(self, peer: Peer, tokens: float, prompt: int, now: float, *, computed: bool) -> None:
        """A prompt that this router had sent there is computed, or nobody wants it any more."""
        row = self.find(peer)
        if row is not None:
            self._accounts[row].over(tokens, prompt, now, computed=computed)
            self._write_prompts(row)

    def sequence_over(self, peer: Peer) -> None:
        """A sequence that this router had sent there has ended."""
        row = self.find(peer)
        if row is not None and self._accounts[row].own_sequences:
            self._accounts[row].own_sequences -= 1
            self._write_sequences(row)

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
            self._accounts[row].correct(ratio)
            self._write(row)

    def _allot(self, name: str) -> int:
        row = next((row for row, worker in enumerate(self.workers) if worker is None), len(self.workers))
        if row == len(self.workers):
            self.workers.append(None)
            self._accounts.append(Account())
        if row >= len(self):
            for column in (*_COLUMNS, "seeds"):
                before = getattr(self, column)
                setattr(self, column, np.concatenate((before, np.ones_like(before))))
            nobody = np.zeros(len(self), dtype=bool)
            self.prefill = np.concatenate((self.prefill, nobody))
            self.decode = np.concatenate((self.decode, nobody))
            self.prefills = np.concatenate((self.prefills, nobody))
            self.recent.grow(len(self))
            self.links.grow(len(self))
        self._rows[name] = row
        self.seeds[row] = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        return row

    def _refresh(self, row: int, worker: Worker, now: float) -> None:
        before, load, profile = self.workers[row], worker.load, worker.profile
        if before is None or before.peer != worker.peer:
            # When all come at once none is newer than the others.
            first = self._begun is None or now - self._begun <= self._slow_start
            self.joined[row] = -np.inf if first else now
            self.newest = max(self.newest, self.joined[row])
            self._accounts[row] = Account(faded=now)
            self.recent.forget(row)
            self.links.forget(row, now)
        self.workers[row] = worker
        account, heard = self._accounts[row], before is None or before.load is not load
        able = worker.accepts_work and profile.model == self._model
        moved = able != bool(self.prefill[row] or self.decode[row])
        # Most heartbeats bring a profile that is the same, but another object.
        if moved or before is None or (before.profile is not profile and before.profile != profile):
            self._changed()
            self.links.know(row, profile)
        if moved and before is not None:
            account.come_back(load.steps)
        self.prefill[row] = able and profile.role == "prefill"
        self.decode[row] = able and profile.role == "decode"
        self.prefills[row] = profile.prefills
        size = profile.layout.block_size
        self.room[row] = (load.pool.free + load.pool.cached) * size
        self.block_size[row] = size
        self.slots[row] = profile.max_sequences or np.inf
        self.empty[row] = load.empty_slots
        self.paced[row] = bool(load.step_fixed or load.step_per_token)
        if heard:
            last = None if before is None or before.peer != worker.peer else before
            self.waiting[row], self.claimed[row] = load.waiting_tokens, 0.0
            account.hear(load.waiting_tokens, load.running + load.waiting, now)
            self.links.hear(row, None if last is None else last.load, load, now)
            self._measure(account, worker, last, now)
        self._write(row)

    def _changed(self) -> None:
        self._sizes = self._names = None
        self._able.clear()
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
        """Put down what follows from the account, for all requests to come."""
        account, worker = self._accounts[row], self.workers[row]
        assert worker is not None, "it was seen"
        factor = beyond_noise(account.slowness)
        self.correction[row] = beyond_noise(account.correction)
        fixed, per_token = (factor * part for part in self._paces[worker.profile.role].line)
        self.fixed[row] = fixed
        self.per_token[row] = per_token
        self.step_tokens[row] = most = worker.profile.step_tokens or STEP_TOKENS
        self.pace[row] = max(SHORTEST, per_token + fixed / most)
        self.beside[row] = factor * self._paces["prefill"].line[1]
        self._write_prompts(row)
        self._write_sequences(row)

    def _write_prompts(self, row: int) -> None:
        account, fixed, pace = self._accounts[row], float(self.fixed[row]), float(self.pace[row])
        ahead, head = account.ahead, account.head
        self.ahead[row] = ahead
        # A step that is under way has its fixed part too.
        self.backlog[row] = fixed + ahead * pace if ahead else 0.0
        self.since[row] = account.since
        self.head[row] = fixed + head * pace if head else 0.0

    def _write_sequences(self, row: int) -> None:
        account = self._accounts[row]
        self.sequences[row] = account.sequences
        self.step[row] = self.fixed[row] + self.per_token[row] * (account.sequences + 1)
