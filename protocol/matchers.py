"""Grammars made ready to be used, by llguidance: the same way where one is checked and where one is obeyed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray

from protocol.errors import UnsupportedField
from protocol.grammar import Grammar

LIMITS = LLParserLimits(step_lexer_fuel=20_000, initial_lexer_fuel=50_000)
"""A tenth and less of the library's own: by those one token of a malicious expression took seconds, and every other
request's step with it."""


NO_TEXT_FITS = ("NoExtension", "NoExtensionBias")
"""The library's bare words for a grammar that is none of any text."""


def read_tokenizer(file: Path, vocab_size: int) -> LLTokenizer:
    """The tokenizer of a checkpoint, as grammars need it; takes some tenths of a second.

    Args:
        file: its ``tokenizer.json``.
        vocab_size: rows of the logits, at least as many as the tokenizer has tokens.

    Raises:
        UnsupportedField: it cannot be used for grammars.
    """
    try:
        return LLTokenizer(file.read_text(encoding="utf-8"), n_vocab=vocab_size)
    except (OSError, ValueError, RuntimeError) as error:
        raise UnsupportedField(f"{file.name} cannot be used for grammars: {error}", field="grammar") from error


def next_tokens(matcher: LLMatcher, vocab_size: int) -> NDArray[np.bool_]:
    """[V], the tokens that ``matcher`` allows next; whether that went well, it tells itself."""
    bits = allocate_token_bitmask(1, vocab_size)
    fill_next_token_bitmask(matcher, bits)
    return np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab_size].astype(np.bool_)


def compiled(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """A matcher at the beginning of ``grammar``; one that is in error tells why that cannot be used.

    How long this takes nobody can tell beforehand, so grammars of strangers are compiled where it can be ended
    (:mod:`router.front.inspector`) before anything else is done with them.
    """
    matcher = LLMatcher(tokenizer, grammar.source(), log_level=0, limits=LIMITS)
    # Its first two tokens are where one that is too large shows it.
    probe = matcher.deep_copy()
    for _ in range(2):
        if probe.is_error():
            return probe
        tokens = next_tokens(probe, tokenizer.vocab_size)
        if probe.is_error():
            return probe
        probe.consume_token(int(tokens.argmax()))
    return matcher


def reason(matcher: LLMatcher) -> str:
    """Why a matcher is in error, without its whole state and the grammar, which the library adds."""
    word = str(matcher.get_error()).partition("\n<state>")[0]
    return "no text fits it; a rule or a reference may lead to nothing but itself" if word in NO_TEXT_FITS else word
