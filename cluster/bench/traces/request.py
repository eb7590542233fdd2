"""One request of a trace."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_TOKENS = 16
"""Tokens that one id of :attr:`TraceRequest.blocks` stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """When it comes, and what it is.

    Attributes:
        at: seconds since the trace began.
        blocks: ids of consecutive pieces of :data:`BLOCK_TOKENS` tokens of the prompt. Equal ids are equal tokens, in
            whichever request; of the last piece the prompt may have the beginning only.
        prompt_tokens: of the prompt; as many blocks as they need.
        output_tokens: of the answer.
        session: equal in the turns of one conversation.
    """

    at: float
    blocks: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    session: int

    def __post_init__(self) -> None:
        assert self.at >= 0.0, "nothing comes before the trace begins"
        assert len(self.blocks) == blocks_for(self.prompt_tokens), "every token has a block"
        assert self.prompt_tokens > 0, "a prompt has a token"
        assert self.output_tokens > 0, "an answer has a token"


def blocks_for(tokens: int) -> int:
    """Blocks that so many tokens need."""
    return -(-tokens // BLOCK_TOKENS)
