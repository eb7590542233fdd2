"""What one sequence is guessed to go on with, and how much of that is worth a try.

Life cycle: made when the sequence begins to run; for each step :meth:`Drafter.propose`, and, where that gave a draft,
:meth:`Drafter.judge` once it is known how much of it was right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from decode_worker.ngram_index import NgramIndex
from decode_worker.speculation import Speculation

WORTH = 0.3
"""A token is drafted while its chance to be accepted is at least this. A row more costs a step of one sequence some
hundredths, and one of many sequences up to half of what it could save."""
PROBE = 16
"""Where nothing is worth it, one token is drafted every so many steps, to see whether that has changed."""
_FADE = 0.85
"""What an earlier draft weighs against the one after it."""


class Drafter:
    """Drafts for one sequence.

    Args:
        settings: how they are made.
        token_ids: of the sequence when it begins to run.
    """

    def __init__(self, settings: Speculation, token_ids: Sequence[int]) -> None:
        self._most = settings.tokens
        self._index = NgramIndex(settings.min_match, settings.max_match)
        self._index.learn(token_ids)
        # Tokens that were right, and drafts that ended with a wrong one; faded. At first: two thirds are right.
        self._right, self._wrong = 2.0, 1.0
        self._steps = 0

    @property
    def length(self) -> int:
        """Tokens that are worth drafting: the last of them is as likely as :data:`WORTH`."""
        chance = self._right / (self._right + self._wrong)
        if chance < WORTH:
            return 0
        return self._most if chance**self._most >= WORTH else int(math.log(WORTH) / math.log(chance))

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Up to ``most`` tokens that may come after ``token_ids``; often none."""
        self._steps += 1
        count = min(self.length or int(self._steps % PROBE == 0), most)
        return self._index.continuation(token_ids, count) if count > 0 else ()

    def judge(self, drafted: int, accepted: int) -> None:
        """Of a draft of ``drafted`` tokens the first ``accepted`` were right."""
        self._right = self._right * _FADE + accepted
        self._wrong = self._wrong * _FADE + (accepted < drafted)
