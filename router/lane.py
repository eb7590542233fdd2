"""One worker in plain numbers: what placement reckons with, written anew with each event that changes it.

Life cycle of a lane: blank while its row is nobody's, opened with an incarnation, written by the fleet from then on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from router.account import Account, beyond_noise
from router.role_pace import Line

SHORTEST = 1e-9
"""Seconds that a token takes at least."""
PASSED = 0.75
"""Share of what is at the head of a queue that counts as done at most, as long as a prompt of this router's is there.

Who is overdue is not free, and no equal of those that have nothing to do. What others had may be over already."""


@dataclass(slots=True)
class Lane:
    """The numbers. Of a row that is free they are reckoned with like all others, to no effect: 1 does no harm.

    Attributes:
        account: what they follow from.
        ahead, sequences: prompt tokens, and sequences, that are there or on their way.
        backlog: seconds that the tokens ahead take in all.
        since, head: when what is at the head of the queue began, and seconds of it that may have passed by now.
        fixed, per_token: seconds of a step whatever is in it, and of each token in it.
        pace: seconds of a token where there are many: the fixed part comes once for each step.
        step: seconds of a step with one sequence more than there are.
        step_tokens: that one has room for.
        beside: seconds of a prompt's token in a step that decodes: as prefill workers tell of theirs.
        room: tokens of the blocks that could be given out.
        block_size: of the layout.
        joined: when this incarnation was first seen; long ago for those that came with the first.
        waiting: prompt tokens that the last heartbeat had.
        slots: sequences that it steps side by side; infinite where that is not told.
        empty: tokens that its sequences have room for already.
        claimed: tokens of prompts and answers that this router has sent there since the last heartbeat.
        paced: 1 where the worker has measured its steps, else 0.
        correction: what measured times came to, by those that its role's ``common`` one predicts.
    """

    account: Account = field(default_factory=Account)
    ahead: float = 1.0
    sequences: float = 1.0
    backlog: float = 1.0
    since: float = 1.0
    head: float = 1.0
    fixed: float = 1.0
    per_token: float = 1.0
    pace: float = 1.0
    step: float = 1.0
    step_tokens: float = 1.0
    beside: float = 1.0
    room: float = 1.0
    block_size: float = 1.0
    joined: float = 1.0
    waiting: float = 1.0
    slots: float = 1.0
    empty: float = 1.0
    claimed: float = 1.0
    paced: float = 1.0
    correction: float = 1.0

    def write(self, line: Line, beside: float, step_tokens: int) -> None:
        """Put down what follows from the account, for all requests to come.

        Args:
            line: of the worker's role.
            beside: seconds of a token on prefill workers.
            step_tokens: that a step has room for.
        """
        factor = beyond_noise(self.account.slowness)
        self.correction = beyond_noise(self.account.correction)
        self.fixed, self.per_token = factor * line[0], factor * line[1]
        self.step_tokens = step_tokens
        self.pace = max(SHORTEST, self.per_token + self.fixed / step_tokens)
        self.beside = factor * beside
        self.write_prompts()
        self.write_sequences()

    def write_prompts(self) -> None:
        """The same where only prompts have come or gone."""
        account, fixed, pace = self.account, self.fixed, self.pace
        ahead = account.own_tokens + account.others_tokens
        head = account.head
        self.ahead = ahead
        # A step that is under way has its fixed part too.
        self.backlog = fixed + ahead * pace if ahead else 0.0
        self.since = account.since
        most = PASSED if account.own_tokens else 1.0
        self.head = most * (fixed + head * pace) if head else 0.0

    def write_sequences(self) -> None:
        """The same where only sequences have."""
        sequences = self.account.own_sequences + self.account.others_sequences
        self.sequences = sequences
        self.step = self.fixed + self.per_token * (sequences + 1)
