"""Prompts that a decode worker computes itself: each step has a share of them beside its sequences.

Life cycle of a job here: added when it has room, given shares in the order in which they came, and gone when its prompt
is through, or nobody wants it.
"""

from __future__ import annotations

from cluster.simulation.job import Job
from cluster.simulation.profile import EngineProfile


class LocalPrompts:
    """Those of one worker.

    Args:
        profile: of its engine.

    Attributes:
        tokens: of the step under way.
    """

    def __init__(self, profile: EngineProfile) -> None:
        self._profile = profile
        self._jobs: list[Job] = []
        self._shares: list[tuple[Job, int]] = []
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def left(self) -> int:
        """Tokens that are yet to be computed."""
        return sum(job.prompt.length - job.computed for job in self._jobs)

    def add(self, job: Job) -> None:
        """One more, of which ``job.computed`` tokens are through."""
        self._jobs.append(job)

    def share(self, sequences: int) -> float:
        """Give them what a step leaves beside so many sequences; returns the seconds that it takes more."""
        profile, pairs = self._profile, 0.0
        # However many sequences there are, the first still gets on by a block.
        whole = budget = max(profile.mixed_tokens - sequences, profile.layout.block_size)
        self._shares = []
        for job in self._jobs:
            count = min(budget, job.prompt.length - job.computed)
            pairs += count * (job.computed + 0.5 * count)
            self._shares.append((job, count))
            budget -= count
            if not budget:
                break
        self.tokens = whole - budget
        return profile.prefill_per_token * self.tokens + profile.prefill_per_pair * pairs

    def complete(self) -> list[Job]:
        """The step has ended; returns those whose prompts are through."""
        through = []
        for job, count in self._shares:
            job.computed += count
            if job in self._jobs and job.computed >= job.prompt.length:
                self._jobs.remove(job)
                through.append(job)
        self._shares, self.tokens = [], 0
        return through

    def drop(self, job: Job) -> bool:
        """Nobody wants it any more; False where it is not here."""
        if job not in self._jobs:
            return False
        self._jobs.remove(job)
        return True
