"""Log-probabilities as OpenAI's API shows them: tokens by their text and bytes, not by their ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from protocol.sampling import TokenLogprobs

LEAST = -9999.0
"""Stands for minus infinity, which JSON has no word for."""


class Spelling(Protocol):
    """What is needed of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """What ``token_id`` adds to a text, as bytes; a special token's name."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    r"""One token of a prompt or an output with its log-probabilities.

    Attributes:
        token: its text; ``bytes:\xe2\x82`` where it is no text by itself.
        raw: its bytes.
        logprob: of it; None for the first token of a prompt, which nothing stands before.
        top: ``(text, bytes, log-probability)`` of the alternatives, most likely first.
        offset: characters of the text before it.
    """

    token: str
    raw: bytes
    logprob: float | None
    top: tuple[tuple[str, bytes, float], ...]
    offset: int

    @classmethod
    def of(cls, spelling: Spelling, token_id: int, logprobs: TokenLogprobs | None, offset: int) -> ShownToken:
        """``token_id`` as a client sees it."""
        raw = spelling.token_bytes(token_id)
        if logprobs is None:
            return cls(shown_text(raw), raw, None, (), offset)
        alternatives = [(spelling.token_bytes(other), value) for other, value in logprobs.top]
        return cls(
            token=shown_text(raw),
            raw=raw,
            logprob=max(logprobs.logprob, LEAST),
            top=tuple((shown_text(other), other, max(value, LEAST)) for other, value in alternatives),
            offset=offset,
        )


def chat_logprobs(tokens: Sequence[ShownToken]) -> dict[str, Any]:
    """The ``logprobs`` of a chat's choice."""
    return {
        "content": [
            {
                "token": shown.token,
                "logprob": shown.logprob,
                "bytes": list(shown.raw),
                "top_logprobs": [
                    {"token": text, "logprob": logprob, "bytes": list(raw)} for text, raw, logprob in shown.top
                ],
            }
            for shown in tokens
        ],
        "refusal": None,
    }


def completion_logprobs(tokens: Sequence[ShownToken]) -> dict[str, Any]:
    """The ``logprobs`` of a completion's choice; a token is among its alternatives though it be none of the best."""
    return {
        "tokens": [shown.token for shown in tokens],
        "token_logprobs": [shown.logprob for shown in tokens],
        "top_logprobs": [
            None
            if shown.logprob is None
            else {text: logprob for text, _, logprob in shown.top} | {shown.token: shown.logprob}
            for shown in tokens
        ],
        "text_offset": [shown.offset for shown in tokens],
    }


def shown_text(raw: bytes) -> str:
    r"""The text of a token's bytes; ``bytes:\xe2\x82`` where they are none by themselves."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
