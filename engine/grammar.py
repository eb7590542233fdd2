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
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray

from protocol.errors import InvalidRequest, KVFerryError, UnsupportedField
from protocol.grammar import Grammar
from protocol.sampling import SamplingParams

KEPT = 1024
"""Matchers, and compiled grammars, that are kept; the longest unused go first."""

LIMITS = LLParserLimits(step_lexer_fuel=20_000, initial_lexer_fuel=50_000)
"""A tenth and less of the library's own: by those one token of a malicious expression took seconds, and every other
request's step with it."""

log = logging.getLogger(__name__)
K = TypeVar("K")
Place = tuple[Grammar, tuple[int, ...]]
"""A grammar, and the output that has gone through it."""


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
        self._lack = ""
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._places: OrderedDict[Place, LLMatcher] = OrderedDict()
        self._bits = allocate_token_bitmask(1, vocab_size)
        self._lock = Lock()

    def warm_up(self) -> None:
        """Read the tokenizer, which takes a moment; a checkpoint without one serves requests without grammars."""
        with self._lock:
            if self._tokenizer is not None or self._lack:
                return
            try:
                self._tokenizer = LLTokenizer(self._file.read_text(encoding="utf-8"), n_vocab=self._vocab_size)
            except (OSError, ValueError, RuntimeError) as error:
                self._lack = f"{self._file.name} cannot be used for grammars: {error}"

    def refusal(self, sampling: SamplingParams) -> KVFerryError | None:
        """Why a request with these settings cannot be served, or None."""
        if sampling.grammar is None:
            return None
        self.warm_up()
        if self._tokenizer is None:
            return UnsupportedField(self._lack, field="grammar")
        with self._lock:
            matcher = self._compile(self._tokenizer, sampling.grammar)
        return InvalidRequest(f"grammar: {_reason(matcher)}", field="grammar") if matcher.is_error() else None

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
        fill_next_token_bitmask(matcher, self._bits)
        tokens = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._vocab_size].astype(np.bool_)
        if matcher.is_error():
            log.warning("a grammar was given up after %d tokens: %s", len(output), _reason(matcher))
            tokens[:] = False
        if matcher.is_error() or matcher.is_accepting():
            tokens[[token for token in sampling.stop_token_ids if token < self._vocab_size]] = True
        self._keep(self._places, (grammar, output), matcher)
        return tokens if tokens.any() else None

    def _at(self, tokenizer: LLTokenizer, grammar: Grammar, output: tuple[int, ...]) -> LLMatcher:
        matcher = self._places.pop((grammar, output), None)
        if matcher is not None:
            return matcher
        matcher = self._places.pop((grammar, output[:-1]), None) if output else None
        if matcher is None:
            matcher = self._compile(tokenizer, grammar).deep_copy()
            matcher.consume_tokens(list(output))
        else:
            matcher.consume_token(output[-1])
        return matcher

    def _compile(self, tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
        compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            compiled = LLMatcher(tokenizer, grammar.source(), log_level=0, limits=LIMITS)
            compiled = self._tried(compiled)
        self._keep(self._compiled, grammar, compiled)
        return compiled

    def _tried(self, compiled: LLMatcher) -> LLMatcher:
        """The same, or one that tells what is wrong: its first two tokens are where one that is too large shows it."""
        probe = compiled.deep_copy()
        for _ in range(2):
            if not probe.is_error():
                fill_next_token_bitmask(probe, self._bits)
            if probe.is_error():
                return probe
            probe.consume_token(int(np.unpackbits(self._bits.view(np.uint8), bitorder="little").argmax()))
        return compiled

    @staticmethod
    def _keep(kept: OrderedDict[K, LLMatcher], key: K, matcher: LLMatcher) -> None:
        kept[key] = matcher
        while len(kept) > KEPT:
            kept.popitem(last=False)


def _reason(matcher: LLMatcher) -> str:
    # Its whole state follows, and the grammar.
    return str(matcher.get_error()).partition("\n<state>")[0]
