"""A prompt of a trace as placement sees it: its length, and the keys of its blocks.

A trace tells of pieces of 16 tokens by numbers, equal for equal tokens. The key of a block stands for all up to its
end, as a block's hash does; it is a sum over the pieces, so that a whole prompt is a few operations over arrays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.bench.traces.request import BLOCK_TOKENS, TraceRequest
from router.block_slots import Array

SESSIONS = 1 << 16
"""Of which it is remembered what was answered, those that had a turn last."""
MAX_BLOCKS = 1 << 21
"""Positions of one prompt; more than a trace has."""
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def block_keys(pieces: NDArray[np.int64]) -> Array:
    """A key for each piece, of all up to its end (splitmix64 over sums)."""
    places = np.arange(1, len(pieces) + 1, dtype=np.uint64)
    sums = np.cumsum(_mixed(pieces.view(np.uint64) + places * _STEP), dtype=np.uint64)
    return np.maximum(_mixed(sums), np.uint64(1))


def _mixed(values: Array) -> Array:
    values = (values ^ (values >> np.uint64(30))) * _FACTORS[0]
    values = (values ^ (values >> np.uint64(27))) * _FACTORS[1]
    return values ^ (values >> np.uint64(31))


class SimulatedPrompt:
    """A prompt, and its answer behind it, which is a part of the prompt of a further attempt.

    Args:
        keys: of all blocks.
        length: tokens of the prompt.
        block_size: of the workers.

    Attributes:
        length: tokens of the prompt.
        blocks: keys of the full blocks of prompt and answer, one after the other.
    """

    __slots__ = ("_keys", "_size", "blocks", "length")

    def __init__(self, keys: Array, length: int, block_size: int) -> None:
        self._keys = keys
        self._size = block_size
        self.length = length
        self.blocks = keys.tobytes()

    def keys(self, block_size: int) -> Iterator[Array]:
        """Of the full blocks of the prompt, in order."""
        assert block_size == self._size, "all simulated workers have blocks of one size"
        yield self._keys[: self.length // block_size]

    def with_answer(self, tokens: int) -> SimulatedPrompt:
        """The same with so many more tokens, of its answer."""
        return SimulatedPrompt(self._keys, self.length + tokens, self._size)


@dataclass(slots=True)
class _Session:
    """What was said so far. ``answers`` are the blocks, from and to, in which there are tokens of answers."""

    last: int
    last_id: int
    answers: tuple[tuple[int, int], ...]


class Prompts:
    """The prompts of a trace, in order.

    A trace names the pieces of an answer only in the prompt of the next turn. So they go by names of their own, in the
    answer as in the turns after it.

    Args:
        block_size: of the workers; a multiple of that of traces.
    """

    def __init__(self, block_size: int) -> None:
        assert block_size % BLOCK_TOKENS == 0, "a block is made of whole pieces"
        self._size = block_size
        self._step = block_size // BLOCK_TOKENS
        self._sessions: OrderedDict[int, _Session] = OrderedDict()

    def of(self, request: TraceRequest) -> SimulatedPrompt:
        """The prompt of the next request."""
        known = self._sessions.pop(request.session, None)
        full = request.prompt_tokens // BLOCK_TOKENS
        end = (request.prompt_tokens + request.output_tokens) // BLOCK_TOKENS
        answers: tuple[tuple[int, int], ...] = ()
        if known is not None and known.last < full and request.blocks[known.last] == known.last_id:
            answers = known.answers
        pieces = np.empty(end, dtype=np.int64)
        pieces[:full] = request.blocks[:full]
        for start, stop in (*answers, (full, end)):
            pieces[start:stop] = np.arange(start, stop) - (request.session + 1) * MAX_BLOCKS
        if full:
            turn = _Session(full - 1, request.blocks[full - 1], (*answers, (full, end)))
            self._sessions[request.session] = turn
            if len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)
        return SimulatedPrompt(block_keys(pieces)[self._step - 1 :: self._step], request.prompt_tokens, self._size)
