"""Log-probabilities and token ids as the client gives them back, and how they are read from the router's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True)
class ScoredToken:
    """One token of an answer.

    Attributes:
        token: its text.
        logprob: None for the first token of an echoed prompt.
        top: ``(text, log-probability)`` of the most likely ones.
    """

    token: str
    logprob: float | None
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class RankedToken:
    """A token that stands, or might stand, at one place of a prompt; ``rank`` 1 is the most likely."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptLogprobs = tuple[Mapping[int, RankedToken] | None, ...]
"""For each token of a prompt, by token id: itself and the most likely ones. None for the first."""


@dataclass(frozen=True)
class Tokenization:
    """What ``/tokenize`` says.

    Attributes:
        tokens: ids.
        count: of them.
        max_model_len: prompt plus output tokens at most; None where the router does not know it.
        token_strs: how the vocabulary writes them; None unless asked for.
    """

    tokens: tuple[int, ...]
    count: int
    max_model_len: int | None = None
    token_strs: tuple[str, ...] | None = None


class _Entry(msgspec.Struct):
    token: str
    logprob: float
    top_logprobs: list[_Entry] = []

    def to_token(self) -> ScoredToken:
        return ScoredToken(self.token, self.logprob, tuple((top.token, top.logprob) for top in self.top_logprobs))


class ChoiceLogprobs(msgspec.Struct):
    """A choice's ``logprobs``: the lists of a completion, or the ``content`` of a chat."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None
    content: list[_Entry] | None = None

    def to_tokens(self) -> tuple[ScoredToken, ...]:
        """One for each token."""
        if self.content is not None:
            return tuple(entry.to_token() for entry in self.content)
        tops = self.top_logprobs or [None] * len(self.tokens)
        lines = zip(self.tokens, self.token_logprobs, tops, strict=False)
        return tuple(ScoredToken(token, logprob, tuple((top or {}).items())) for token, logprob, top in lines)
