"""Which tokens a request's grammar allows next; the grammars themselves are llguidance's.

Life cycle: made for a checkpoint, :meth:`Grammars.warm_up` reads its tokenizer once, :meth:`Grammars.allowed` per draw.
What is allowed depends on the grammar and the output so far alone, so it is the same on every worker and after a
failover; matchers are kept between draws only to save the way back to where they were.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from protocol.errors import InvalidRequest, KVFerryError
from protocol.grammar import Grammar
from protocol.matchers import compiled, next_tokens, read_tokenizer, reason
from protocol.sampling import SamplingParams

KEPT = 512
"""Matchers that are kept, and compiled grammars; the longest unused go first."""
KEPT_BYTES = 4 << 20
"""The same for the lengths of their grammars: some forty times as much memory goes with them."""

log = logging.getLogger(__name__)
K = TypeVar("K")
Place = tuple[Grammar, tuple[int, ...]]
"""A grammar, and the output that has gone through it."""


class Kept(Generic[K]):
    """Matchers by a key, the longest unused first, within bounds; the newest is always there."""

    def __init__(self) -> None:
        self._matchers: OrderedDict[K, tuple[LLMatcher, int]] = OrderedDict()
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._matchers)

    def take(self, key: K) -> LLMatcher | None:
        """The matcher of ``key``, kept no more."""
        matcher, nbytes = self._matchers.pop(key, (None, 0))
        self._nbytes -= nbytes
        return matcher

    def keep(self, key: K, matcher: LLMatcher, nbytes: int) -> None:
        """Keep ``matcher``, whose grammar has so many bytes."""
        self.take(key)
        self._matchers[key] = matcher, nbytes
        self._nbytes += nbytes
        while len(self._matchers) > 1 and (len(self._matchers) > KEPT or self._nbytes > KEPT_BYTES):
            _, (_, freed) = self._matchers.popitem(last=False)
            self._nbytes -= freed


class Grammars:
    """The grammars of one model's requests. Any thread may call: requests are checked while a step draws.

    Args:
        directory: of the checkpoint.
        vocab_size: rows of the logits; ids beyond the tokenizer's own are never allowed.
    """

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self._file = directory / "tokenizer.json"
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._lack: KVFerryError | None = None
        self._compiled: Kept[Grammar] = Kept()
        self._places: Kept[Place] = Kept()
        self._lock = Lock()

    def warm_up(self) -> None:
        """Read the tokenizer, which takes a moment; a checkpoint without one serves requests without grammars."""
        with self._lock:
            if self._tokenizer is not None or self._lack is not None:
                return
            try:
                self._tokenizer = read_tokenizer(self._file, self._vocab_size)
            except KVFerryError as error:
                self._lack = error

    def refusal(self, sampling: SamplingParams) -> KVFerryError | None:
        """Why a request with these settings cannot be served, or None."""
        if sampling.grammar is None:
            return None
        self.warm_up()
        if self._tokenizer is None:
            return self._lack
        with self._lock:
            matcher = self._compile(self._tokenizer, sampling.grammar)
        return InvalidRequest(f"grammar: {reason(matcher)}", field="grammar") if matcher.is_error() else None

    def allowed(self, sampling: SamplingParams, position: int, history: Sequence[int]) -> NDArray[np.bool_] | None:
        """Which tokens may come next.

        Args:
            sampling: of a request that is not refused.
            position: output tokens so far.
            history: tokens of the request, the last ``position`` of them output.

        Returns:
            [V], at least one of them True. Of a grammar that proves too large in mid-way, the end. None where every
            token may come: there is no grammar, or the output has left it, as only tokens that somebody guesses do.
        """
        grammar, tokenizer = sampling.grammar, self._tokenizer
        if grammar is None or tokenizer is None:
            return None
        with self._lock:
            return self._allowed(tokenizer, sampling, grammar, tuple(history[len(history) - position :]))

    def _allowed(
        self, tokenizer: LLTokenizer, sampling: SamplingParams, grammar: Grammar, output: tuple[int, ...]
    ) -> NDArray[np.bool_] | None:
        matcher = self._at(tokenizer, grammar, output)
        if matcher.is_error():
            return None
        tokens = next_tokens(matcher, self._vocab_size)
        if matcher.is_error():
            log.warning("a grammar was given up after %d tokens: %s", len(output), reason(matcher))
            tokens[:] = False
        # Which tokens end an output is the request's to say, not the tokenizer's.
        ends = [token for token in tokenizer.eos_tokens if tokens[token]]
        tokens[ends] = False
        if matcher.is_error() or matcher.is_accepting():
            tokens[[token for token in sampling.stop_token_ids if token < self._vocab_size]] = True
        if not tokens.any():
            # Nothing ends this request, and nothing else may come.
            tokens[ends] = True
        self._places.keep((grammar, output), matcher, len(grammar.text))
        return tokens if tokens.any() else None

    def _at(self, tokenizer: LLTokenizer, grammar: Grammar, output: tuple[int, ...]) -> LLMatcher:
        matcher = self._places.take((grammar, output))
        if matcher is not None:
            return matcher
        matcher = self._places.take((grammar, output[:-1])) if output else None
        rest = output[-1:]
        if matcher is None:
            matcher, rest = self._compile(tokenizer, grammar).deep_copy(), output
        for token in rest:
            # What comes after the end changes nothing.
            if not matcher.is_stopped() or matcher.is_error():
                matcher.consume_token(token)
        return matcher

    def _compile(self, tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
        matcher = self._compiled.take(grammar)
        if matcher is None:
            matcher = compiled(tokenizer, grammar)
        self._compiled.keep(grammar, matcher, len(grammar.text))
        return matcher
