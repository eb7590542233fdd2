"""A prompt as it goes back to the client: its text before the output's, its tokens with their log-probabilities."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from protocol.prompt_logprobs import LogprobTable
from protocol.sampling import TokenLogprobs
from router.front.detokenizer import KEPT_WINDOW, Detokenizer
from router.front.logprobs import ShownToken
from router.tokenizer import Tokenizer


@dataclass(frozen=True)
class Echo:
    """One prompt's text.

    Attributes:
        text: what the client sent; of a prompt in token ids what they decode to, without half a character at its end.
        tail: its last token ids, which the first characters of the output may depend on.
    """

    text: str
    tail: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, token_ids: tuple[int, ...], text: str | None) -> Echo:
        """The echo of ``token_ids``, which ``text`` was turned into; None where ids were sent."""
        tail = token_ids[-KEPT_WINDOW:]
        if text is not None:
            return cls(text, tail)
        detokenizer = Detokenizer(tokenizer)
        for token_id in tail:
            detokenizer.push(token_id)
        # What is held back here comes with the first piece of the output.
        return cls(tokenizer.decode(token_ids).removesuffix(detokenizer.flush()), tail)


def shown_prompt(
    tokenizer: Tokenizer, token_ids: Sequence[int], text: str, tables: Sequence[LogprobTable], alternatives: int
) -> list[ShownToken]:
    """A prompt's tokens as a completion shows them, the first without a log-probability.

    Args:
        tokenizer: of its tokens.
        token_ids: it.
        text: its echo.
        tables: rows for each token but the first.
        alternatives: shown beside each at most.
    """
    rows = (row for table in tables for row in table.rows())
    known = (TokenLogprobs(row.logprob, tuple(islice(row.top, alternatives))) for row in rows)
    found: list[TokenLogprobs | None] = [None, *known]
    offsets = token_offsets(tokenizer, token_ids, text)
    return [ShownToken.of(tokenizer, *line) for line in zip(token_ids, found, offsets, strict=True)]


def token_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Characters of ``text`` before each of ``token_ids``.

    Exact where the tokens spell the text. Tokens that it does not show (such as one that begins a sequence) take no
    room in it, and a space that a tokenizer puts before a text is passed over.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, at = [], 0
    for token_id in token_ids:
        offsets.append(at)
        piece = decoder.decode(tokenizer.token_bytes(token_id))
        for found in (piece, piece.removeprefix(" ")):
            if text.startswith(found, at):
                at += len(found)
                break
        else:
            if not tokenizer.is_silent(token_id):
                at = min(at + len(piece), len(text))
    return offsets
