"""A decode worker: room for sequences, in the order in which they came, and steps of all those whose blocks are there.

Life cycle of a job here: waiting, reserved for (its whole output at once, so that none has to make room), landed, or
computed here, stepped from the next step on, ended. Steps are not done one by one: while the same sequences run, the
time of any number of steps is a formula, and only those are looked at in which one joins or ends, or that compute a
share of a prompt.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from cluster.simulation.job import Job
from cluster.simulation.link import Link
from cluster.simulation.local_prompts import LocalPrompts
from cluster.simulation.simulated_worker import SimulatedWorker, Site, Tally
from protocol.ids import Peer, Role
from protocol.messages import WorkerLoad


class DecodeWorker(SimulatedWorker):
    """One of them.

    Args:
        peer, site, link, tally: see :class:`~cluster.simulation.simulated_worker.SimulatedWorker`.
        reserved: is told when there is room for a job.
        computed: is told when a job whose prompt is computed here has its first token.
        taken_over: is told of a job that joins the steps, and the seconds until it has a token of them.
        ended: is told when a job has its last token.
    """

    role: Role = "decode"

    def __init__(
        self,
        peer: Peer,
        site: Site,
        link: Link,
        tally: Tally,
        reserved: Callable[[Job], None],
        computed: Callable[[Job], None],
        taken_over: Callable[[Job, float], None],
        ended: Callable[[Job], None],
    ) -> None:
        super().__init__(peer, site, link, tally)
        self._reserved = reserved
        self._computed = computed
        self._taken_over = taken_over
        self._ended = ended
        self._waiting: deque[Job] = deque()
        self._expected = 0
        self._landed: list[Job] = []
        self._ends: list[tuple[int, int, Job]] = []
        self._order = 0
        # Since ``_since``, when ``_steps`` were done, the sequences are the same; they had ``_context`` tokens then.
        self._since = 0.0
        self._steps = 0
        self._context = 0
        self._plan = 0
        self._tokens = 0
        self._local = LocalPrompts(site.profile)
        # When the step under way ends, if it computes a share of a prompt.
        self._mixed_until: float | None = None
        self._seconds = 0.0
        # Tokens of answers that room was made for, and of prompts whose sequences are stepped.
        self._promised = self._prompts = 0

    def receive(self, job: Job) -> None:
        """Room is wanted for a job."""
        if self.alive:
            self._waiting.append(job)
            self._let_in()
            if self._local:
                self._replan()

    def land(self, job: Job) -> None:
        """A job's blocks are here."""
        stay = job.there
        if not self.alive or stay is None:
            return
        if job.given_up:
            self.drop(job)
            return
        self._seal(job, stay, stay.found * self._size, job.prompt.length)
        self._expected -= 1
        self._landed.append(job)
        self._replan()

    def drop(self, job: Job) -> None:
        """Nobody wants a job any more, wherever it is."""
        job.given_up = True
        stay = job.there
        if not self.alive or stay is None:
            return
        job.there = None
        self._promised -= job.output
        if job in self._landed:
            self._landed.remove(job)
        elif job.joined >= 0:
            self._catch_up(self._step_at(self._agenda.now))
            self._context -= self._context_of(job)
            self._prompts -= job.prompt.length + 1
            self._ends = [each for each in self._ends if each[2] is not job]
            self._ends.sort()
        elif not self._local.drop(job):
            self._expected -= 1
        self._leave(stay)
        self._let_in()
        self._replan()

    def emitted(self, job: Job) -> int:
        """Tokens of a job that have come so far, prefill's not counted."""
        return 0 if job.joined < 0 else max(0, min(self._step_at(self._agenda.now) - job.joined, job.output - 1))

    def load(self) -> WorkerLoad:
        """As the next heartbeat has it."""
        return WorkerLoad(
            pool=self._cache.counts,
            waiting=len(self._waiting) + self._expected + len(self._landed),
            waiting_tokens=self._local.left + sum(job.prompt.length for job in self._waiting),
            running=len(self._ends) + len(self._local),
            open_imports=self._expected,
            steps=self._step_at(self._agenda.now),
            step_seconds=self._seconds,
            empty_slots=max(0, self._promised - (self._context - self._prompts)),
            decode_tokens=self._tokens,
            used_slots=self._cache.counts.used * self._size,
            draining=self.draining,
            kv_bytes=self.link.nbytes,
            kv_seconds=self.link.seconds,
            step_fixed=self._pace.fixed,
            step_per_token=self._pace.per_token,
            step_mean_tokens=self._pace.mean_tokens,
        )

    def _let_in(self) -> None:
        here = len(self._landed) + len(self._ends) + len(self._local)
        while self._waiting and self._expected + here < self._profile.max_sequences:
            job = self._waiting[0]
            if not job.given_up:
                stay = self._take(job, job.prompt.length + job.output)
                if stay is None:
                    return
                job.there, job.reserved = stay, self._agenda.now
                self._promised += job.output
                if job.prefill is self:
                    job.begun = self._agenda.now
                    job.computed = min(stay.found, (job.prompt.length - 1) // self._size) * self._size
                    self.tally.found += job.computed
                    self._local.add(job)
                    here += 1
                else:
                    self._expected += 1
                    self._reserved(job)
            self._waiting.popleft()

    def _pace_now(self) -> tuple[float, float]:
        """Seconds of the next step, and by how much each one after it takes longer."""
        profile, count = self._profile, len(self._ends)
        first = profile.decode_fixed + profile.decode_per_sequence * count + profile.decode_per_context * self._context
        return first, profile.decode_per_context * count

    def _time_of(self, steps: int) -> float:
        """What so many steps take from ``_since`` on."""
        first, growth = self._pace_now()
        return steps * first + 0.5 * growth * steps * (steps - 1)

    def _step_at(self, now: float) -> int:
        """Steps that are done by then."""
        if not self._ends or self._mixed_until is not None:
            return self._steps
        first, growth = self._pace_now()
        past = now - self._since + 1e-9
        half = first - 0.5 * growth
        if growth * past < 1e-9 * half * half:
            return self._steps + int(past / half)
        return self._steps + int((math.sqrt(half * half + 2.0 * growth * past) - half) / growth)

    def _catch_up(self, steps: int) -> None:
        """Account for all steps up to that number."""
        done, count = steps - self._steps, len(self._ends)
        if not done or not (count or self._local.tokens):
            return
        took = self._time_of(done) if self._mixed_until is None else self._mixed_until - self._since
        if not self._local.tokens:
            self._pace.add(count, took / done)
        self._since += took
        self._steps = steps
        self._context += done * count
        self._tokens += done * count
        self._seconds += took
        self.tally.steps += done
        self.tally.tokens += done * count
        self.tally.prompt_tokens += self._local.tokens
        self.tally.busy += took

    def _replan(self) -> None:
        """Say when next a sequence ends, or joins."""
        self._plan += 1
        if self._mixed_until is not None:
            self._agenda.at(self._mixed_until, self._turn, self._plan, self._steps + 1)
            return
        if not self._ends:
            if self._landed or self._local:
                self._since = self._agenda.now
                self._turn(self._plan, self._steps)
            return
        step = self._ends[0][0]
        if self._landed or self._local:
            # A step is under way: who has landed joins the next.
            step = min(step, self._step_at(self._agenda.now) + 1)
        self._agenda.at(self._since + self._time_of(step - self._steps), self._turn, self._plan, step)

    def _turn(self, plan: int, step: int) -> None:
        """Between two steps."""
        if plan != self._plan or not self.alive:
            return
        self._catch_up(step)
        self._mixed_until = None
        for job in self._local.complete():
            self._prompt_through(job)
        ends = self._ends
        while ends and ends[0][0] <= step:
            self._end(heappop(ends)[2])
        joined, self._landed = self._landed, []
        for job in joined:
            job.joined = step
            self._order += 1
            self._context += job.prompt.length + 1
            self._prompts += job.prompt.length + 1
            heappush(ends, (step + job.output - 1, self._order, job))
        self._let_in()
        if self._local:
            more = self._local.share(len(ends))
            self._mixed_until = self._since + more + (self._time_of(1) if ends else self._profile.prefill_fixed)
        for job in joined:
            self._taken_over(job, self._time_of(1) if self._mixed_until is None else self._mixed_until - self._since)
        self._replan()

    def _prompt_through(self, job: Job) -> None:
        stay = job.there
        assert stay is not None, "it was let in"
        self._seal(job, stay, stay.found * self._size, job.prompt.length)
        job.first = self._agenda.now
        self.tally.prompts += 1
        if job.decode is None:
            self._leave(stay)
            job.there = None
        else:
            self._landed.append(job)
        self._computed(job)

    def _context_of(self, job: Job) -> int:
        return job.prompt.length + 1 + self._steps - job.joined

    def _end(self, job: Job) -> None:
        stay = job.there
        assert stay is not None, "it was reserved for"
        self._context -= self._context_of(job)
        self._prompts -= job.prompt.length + 1
        self._promised -= job.output
        self._seal(job, stay, job.prompt.length, job.prompt.length + job.output)
        self._leave(stay)
        job.there = None
        self._ended(job)
