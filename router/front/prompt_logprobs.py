"""Log-probabilities of prompt tokens as vLLM's API shows them: by token id, with ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protocol.prompt_logprobs import LogprobTable
from router.front.logprobs import LEAST, Spelling, shown_text


def prompt_logprobs(
    spelling: Spelling, token_ids: Sequence[int], tables: Sequence[LogprobTable], alternatives: int
) -> list[dict[str, Any] | None]:
    """One object per prompt token: the token itself, then the most likely ones; None for the first token.

    Args:
        spelling: of the tokens.
        token_ids: the prompt.
        tables: rows for each token but the first.
        alternatives: shown beside each at most.
    """
    names: dict[int, str] = {}

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        if token_id not in names:
            names[token_id] = shown_text(spelling.token_bytes(token_id))
        return {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": names[token_id]}

    rows = (row for table in tables for row in table.rows())
    shown: list[dict[str, Any] | None] = [None]
    for token_id, row in zip(token_ids[1:], rows, strict=True):
        found = {str(token_id): entry(token_id, row.logprob, row.rank)}
        for rank, (other, logprob) in enumerate(row.top[:alternatives], 1):
            found.setdefault(str(other), entry(other, logprob, rank))
        shown.append(found)
    return shown
