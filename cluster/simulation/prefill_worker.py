"""A prefill worker: prompts in the order in which they came, in steps of so many tokens at most, and their leases.

Life cycle of a job here: waiting, let in when all its blocks have room, computed in chunks, told of its first token,
and gone once its blocks are with the decode worker, or nobody wants them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from cluster.simulation.job import Job
from cluster.simulation.link import Link
from cluster.simulation.simulated_worker import SimulatedWorker, Site, Tally
from protocol.ids import Peer, Role
from protocol.messages import WorkerLoad


class PrefillWorker(SimulatedWorker):
    """One of them.

    Args:
        peer, site, link, tally: see :class:`~cluster.simulation.simulated_worker.SimulatedWorker`.
        computed: is told when a job's first token is there.
    """

    role: Role = "prefill"

    def __init__(self, peer: Peer, site: Site, link: Link, tally: Tally, computed: Callable[[Job], None]) -> None:
        super().__init__(peer, site, link, tally)
        self._computed = computed
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._stepping = False
        self._tokens = self._steps = 0
        self._seconds = 0.0

    def receive(self, job: Job) -> None:
        """A prompt has come."""
        if self.alive:
            self._waiting.append(job)
            self._step()

    def release(self, job: Job) -> None:
        """The decode worker has the blocks, or nobody wants them."""
        stay, job.here = job.here, None
        if self.alive and stay is not None:
            self._leave(stay)
            self._step()

    def drop(self, job: Job) -> None:
        """Nobody wants a job any more, wherever it is; the blocks of one that is computed stay until the step ends."""
        job.given_up = True
        if job.first is not None:
            self.release(job)

    def load(self) -> WorkerLoad:
        """As the next heartbeat has it."""
        running = sum(job.prompt.length - job.computed for job in self._running)
        return WorkerLoad(
            pool=self._cache.counts,
            waiting=len(self._waiting),
            waiting_tokens=running + sum(job.prompt.length for job in self._waiting),
            running=len(self._running),
            steps=self._steps,
            step_seconds=self._seconds,
            prefill_tokens=self._tokens,
            draining=self.draining,
            kv_bytes=self.link.nbytes,
            kv_seconds=self.link.seconds,
            step_fixed=self._pace.fixed,
            step_per_token=self._pace.per_token,
            step_mean_tokens=self._pace.mean_tokens,
        )

    def _step(self) -> None:
        if self._stepping or not self.alive:
            return
        self._let_in()
        budget, pairs, work = self._profile.step_tokens, 0.0, []
        for job in self._running:
            count = min(budget, job.prompt.length - job.computed)
            pairs += count * (job.computed + 0.5 * count)
            work.append((job, count))
            budget -= count
            if not budget:
                break
        if not work:
            return
        tokens = self._profile.step_tokens - budget
        seconds = self._profile.prefill_seconds(tokens, pairs)
        self._stepping = True
        self._agenda.after(seconds, self._stepped, work, tokens, seconds)

    def _let_in(self) -> None:
        while self._waiting and len(self._running) < self._profile.max_sequences:
            job = self._waiting[0]
            if not job.given_up:
                stay = self._take(job, job.prompt.length)
                if stay is None:
                    return
                job.here, job.begun = stay, self._agenda.now
                # The last token's logits are always computed.
                job.computed = min(stay.found, (job.prompt.length - 1) // self._size) * self._size
                self.tally.found += job.computed
                self._running.append(job)
            self._waiting.popleft()

    def _stepped(self, work: list[tuple[Job, int]], tokens: int, seconds: float) -> None:
        if not self.alive:
            return
        self._stepping = False
        self._pace.add(tokens, seconds)
        self._steps += 1
        self._tokens += tokens
        self._seconds += seconds
        self.tally.steps += 1
        self.tally.tokens += tokens
        self.tally.prompt_tokens += tokens
        self.tally.busy += seconds
        ended = False
        for job, count in work:
            job.computed += count
            if job.given_up or job.computed >= job.prompt.length:
                ended = True
                self._end(job)
        if ended:
            self._running = [job for job in self._running if job.here is not None and job.first is None]
        self._step()

    def _end(self, job: Job) -> None:
        stay = job.here
        assert stay is not None, "it was let in"
        if job.given_up:
            self._leave(stay)
            job.here = None
            return
        self._seal(job, stay, stay.found * self._size, job.prompt.length)
        job.first = self._agenda.now
        self.tally.prompts += 1
        if job.decode is None:
            self._leave(stay)
            job.here = None
        self._computed(job)
