"""All workers as columns of numbers, a row for each name: what placement reckons with, kept between requests.

Life cycle of a row: allotted to a name when it is first seen, refreshed when its worker has beaten, charged with what
this router sends there until the next heartbeat shows it, freed when the name is forgotten.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.ids import Peer, Role
from router.registry import Worker

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Rows = NDArray[np.int64]

FIRST_ROWS = 32
PREFILL_PER_TOKEN, DECODE_FIXED = 2e-4, 2e-2
"""Seconds that are assumed where nobody of a role has measured any."""
STEP_TOKENS = 512
"""Tokens that a step is taken to have room for where a worker does not tell."""
SHORTEST = 1e-9
"""Seconds that a token takes at least."""
TRUSTED_STEPS = 100
"""Steps after which a worker's own measurement counts as much as that of its role."""
COMMON_GAIN, OWN_GAIN = 0.1, 0.01
"""Weight of each measured time in the correction of a role, and in that of one worker by itself."""
LARGEST_CORRECTION = 8.0
FADE = 10.0
"""Seconds in which a worker's own correction fades to a third."""
LINK = 1e9
"""Bytes per second that are assumed where no block has crossed yet."""
_COLUMNS = (
    "waiting",
    "running",
    "room",
    "block_size",
    "fixed",
    "per_token",
    "in_full_steps",
    "crossing",
    "joined",
    "own_tokens",
    "own_sequences",
    "correction",
    "corrected",
    "old_steps",
    "slots",
    "empty",
    "claimed",
    "paced",
)


class Fleet:
    """The columns; all of one length, and what belongs to rows that are free is never looked at.

    Attributes:
        workers: by row, None where it is free.
        prefill, decode: which rows take new work of that kind.
        prefills: which of them are decode workers that compute prompts beside it.
        waiting, running: prompt tokens, and sequences, that the last heartbeat had.
        room: tokens of the blocks that could be given out.
        block_size: of the layout.
        fixed, per_token: seconds of a step, and of each token in it.
        in_full_steps: seconds of a token where there are many: the fixed part comes once for each step.
        crossing: seconds that a token's blocks take over its link.
        joined: when this incarnation was first seen; long ago for those that came with the first.
        own_tokens, own_sequences: sent there by this router since then, less what has ended; below 0 where what the
            heartbeat counted has.
        correction: what measured times came to, by those that its role's ``common`` one predicts.
        corrected: when; it fades from then on.
        common: by role, what measured times come to, by the predicted ones.
        old_steps: of its steps, those before it came, or came back.
        slots: sequences that it steps side by side; infinite where that is not told.
        empty: tokens that its sequences have room for already.
        paced: 1 where the worker has measured its steps, else 0.
        claimed: tokens of prompts and answers that this router has sent there since the last heartbeat.
        seeds: of draws, by the workers' names.
        newest: the last time at which one joined.
    """

    waiting: Floats
    running: Floats
    room: Floats
    block_size: Floats
    fixed: Floats
    per_token: Floats
    in_full_steps: Floats
    crossing: Floats
    joined: Floats
    own_tokens: Floats
    own_sequences: Floats
    correction: Floats
    corrected: Floats
    old_steps: Floats
    slots: Floats
    empty: Floats
    claimed: Floats
    paced: Floats

    def __init__(self, model: str, slow_start: float = 0.0) -> None:
        self._model = model
        self._slow_start = slow_start
        self._begun: float | None = None
        self.newest = -np.inf
        self.workers: list[Worker | None] = []
        self._rows: dict[str, int] = {}
        self.prefill: Bools = np.zeros(FIRST_ROWS, dtype=bool)
        self.decode: Bools = np.zeros(FIRST_ROWS, dtype=bool)
        self.prefills: Bools = np.zeros(FIRST_ROWS, dtype=bool)
        self.seeds = np.zeros(FIRST_ROWS, dtype=np.uint64)
        # Rows that are free are reckoned with like all others, to no effect: 1 divides by nothing wrong.
        for name in _COLUMNS:
            setattr(self, name, np.ones(FIRST_ROWS))
        self._sizes: dict[int, int] | None = None
        self.common: dict[Role, float] = {"prefill": 1.0, "decode": 1.0}
        self._able: dict[str, Rows] = {}
        self._typical: dict[str, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self.prefill)

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

    def block_sizes(self) -> dict[int, int]:
        """Bits of the rows that take work, by their block size."""
        if self._sizes is None:
            self._sizes = {}
            for row in np.flatnonzero(self.prefill | self.decode).tolist():
                size = int(self.block_size[row])
                self._sizes[size] = self._sizes.get(size, 0) | 1 << row
        return self._sizes

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

    def charge(self, row: int, tokens: float, sequences: int) -> None:
        """This router has just sent work there."""
        self.own_tokens[row] += tokens
        self.own_sequences[row] += sequences

    def claim(self, row: int, tokens: float) -> None:
        """What this router has just sent there will take room for so many tokens."""
        self.claimed[row] += tokens

    def release(self, peer: Peer, tokens: float, sequences: int) -> None:
        """Work that this router had sent there is over; the last heartbeat may have counted it already."""
        row = self.find(peer)
        if row is not None:
            self.own_tokens[row] = max(self.own_tokens[row] - tokens, -self.waiting[row])
            self.own_sequences[row] = max(self.own_sequences[row] - sequences, -self.running[row])

    def correct(self, peer: Peer, ratio: float, now: float) -> None:
        """What was predicted of a worker took ``ratio`` times as long.

        Most of that is its whole role's: load that came after the prediction, or steps that all take for longer than
        they tell. Were it each worker's own, equals would differ by noise, and the luckiest would get everything.
        """
        row = self.find(peer)
        worker = None if row is None else self.workers[row]
        if row is None or worker is None:
            return
        role = worker.profile.role
        self.common[role] = _bounded(self.common[role] * ratio**COMMON_GAIN)
        faded = float(self.correction[row]) ** float(np.exp((self.corrected[row] - now) / FADE))
        self.correction[row] = _bounded(faded * ratio**OWN_GAIN)
        self.corrected[row] = now

    def corrections(self, now: float) -> Floats:
        """By row, what predictions are to be multiplied with; a worker's own part fades, so that none starves by it."""
        fading = np.exp(np.minimum(self.corrected - now, 0.0) / FADE)
        corrections: Floats = np.where(self.decode, self.common["decode"], self.common["prefill"])
        return corrections * self.correction**fading

    def _allot(self, name: str) -> int:
        row = next((row for row, worker in enumerate(self.workers) if worker is None), len(self.workers))
        if row == len(self.workers):
            self.workers.append(None)
        if row >= len(self):
            for column in (*_COLUMNS, "seeds"):
                before = getattr(self, column)
                setattr(self, column, np.concatenate((before, np.ones_like(before))))
            nobody = np.zeros(len(self), dtype=bool)
            self.prefill = np.concatenate((self.prefill, nobody))
            self.decode = np.concatenate((self.decode, nobody))
            self.prefills = np.concatenate((self.prefills, nobody))
        self._rows[name] = row
        self.correction[row] = self.in_full_steps[row] = self.block_size[row] = 1.0
        self.seeds[row] = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        return row

    def _refresh(self, row: int, worker: Worker, now: float) -> None:
        before, load, profile = self.workers[row], worker.load, worker.profile
        if before is None or before.peer != worker.peer:
            # When all come at once none is newer than the others.
            first = self._begun is None or now - self._begun <= self._slow_start
            self.joined[row], self.correction[row] = -np.inf if first else now, 1.0
            self.old_steps[row] = 0.0
            self.newest = max(self.newest, self.joined[row])
        if before is None or before.load is not load:
            self.own_tokens[row] = self.own_sequences[row] = self.claimed[row] = 0.0
        self.workers[row] = worker
        able = worker.accepts_work and profile.model == self._model
        moved = able != (self.prefill[row] or self.decode[row])
        if moved or before is None or before.profile is not profile:
            self._changed()
        if moved and before is not None:
            # It went or came back: what was measured before says little of what it does now.
            self.correction[row], self.old_steps[row] = 1.0, load.steps
        self.prefill[row] = able and profile.role == "prefill"
        self.decode[row] = able and profile.role == "decode"
        self.prefills[row] = profile.prefills
        self.waiting[row] = load.waiting_tokens
        self.running[row] = load.running + load.waiting
        size = profile.layout.block_size
        self.room[row] = (load.pool.free + load.pool.cached) * size
        self.block_size[row] = size
        self.slots[row] = profile.max_sequences or np.inf
        self.empty[row] = load.empty_slots
        self.paced[row] = bool(load.step_fixed or load.step_per_token)
        link = load.kv_bytes / load.kv_seconds if load.kv_seconds > 0 and load.kv_bytes else LINK
        self.crossing[row] = profile.layout.block_bytes / size / link
        fixed, per_token = self._pace(worker, int(self.old_steps[row]))
        self.fixed[row], self.per_token[row] = fixed, per_token
        self.in_full_steps[row] = max(SHORTEST, per_token + fixed / (profile.step_tokens or STEP_TOKENS))

    def _changed(self) -> None:
        self._sizes = None
        self._able.clear()

    def _pace(self, worker: Worker, old_steps: int) -> tuple[float, float]:
        """Measured by the worker; the fewer its steps, the more it is taken for one of the others of its role."""
        role, load = worker.profile.role, worker.load
        typical = self._typical.get(role)
        if not load.step_fixed and not load.step_per_token:
            assumed = (0.0, PREFILL_PER_TOKEN) if role == "prefill" else (DECODE_FIXED, DECODE_FIXED / 20)
            return assumed if typical is None else typical
        own = load.step_fixed, load.step_per_token
        if typical is None:
            typical = own
        self._typical[role] = _mixed(typical, own, 0.1)
        steps = max(0, load.steps - old_steps)
        return _mixed(typical, own, steps / (steps + TRUSTED_STEPS))


def _bounded(correction: float) -> float:
    return min(max(correction, 1 / LARGEST_CORRECTION), LARGEST_CORRECTION)


def _mixed(here: tuple[float, float], there: tuple[float, float], weight: float) -> tuple[float, float]:
    return here[0] + weight * (there[0] - here[0]), here[1] + weight * (there[1] - here[1])
