"""Where the last few tokens of a sequence stood before.

Life cycle: made empty for one sequence, asked by :meth:`NgramIndex.continuation` with all of its tokens so far, which
only grow; what came since the last question is taken in then.
"""

from __future__ import annotations

from collections.abc import Sequence

SPAN = 8192
"""Tokens back to which a match is certainly found; twice as many are remembered at most."""


class NgramIndex:
    """The last end of each run of ``shortest`` to ``longest`` tokens; constant work per token, bounded memory.

    Runs are known by their hash. Two that share one give a wrong continuation, as any match may.

    Args:
        shortest: tokens of the shortest runs.
        longest: tokens of the longest.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        # Two generations: when the newer has its fill it becomes the older, and that is forgotten.
        self._newer: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._newer_since = 0
        self._known = 0

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def learn(self, token_ids: Sequence[int]) -> None:
        """Take in what is new in ``token_ids``: every run in it that another token follows."""
        stop = len(token_ids) - 1
        if stop - self._known > SPAN:
            self._older, self._newer = {}, {}
            self._known = self._newer_since = stop - SPAN
        if stop - self._newer_since > SPAN:
            self._older, self._newer = self._newer, {}
            self._newer_since = self._known
        for size in self._sizes:
            first = max(self._known, size - 1)
            window = token_ids[first - size + 1 : max(stop, first)]
            runs = zip(*(window[place:] for place in range(size)), strict=False)
            self._newer.update(zip(map(hash, runs), range(first, stop), strict=False))
        self._known = max(self._known, stop)

    def continuation(self, token_ids: Sequence[int], count: int) -> tuple[int, ...]:
        """The ``count`` tokens after the latest earlier place of the longest end of ``token_ids`` that has one.

        Beyond the end of ``token_ids`` the continuation repeats what it began with, as the text would.

        Returns:
            ``count`` tokens, or none where nothing matches.
        """
        self.learn(token_ids)
        for size in self._sizes:
            if size >= len(token_ids):
                continue
            run = hash(tuple(token_ids[-size:]))
            end = self._newer.get(run)
            if end is None:
                end = self._older.get(run)
            if end is not None:
                start = end + 1
                period = len(token_ids) - start
                return tuple(token_ids[start + place % period] for place in range(count))
        return ()
