"""What the request machine asks its shell to do, in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from protocol.errors import KVFerryError
from protocol.ids import Peer, RequestKey
from protocol.messages import Prefill, Reserve
from protocol.prompt_logprobs import LogprobTable
from protocol.sampling import FinishReason, TokenLogprobs


class Stage(Enum):
    """Where an attempt's tokens came from."""

    PREFILLED = "prefilled"
    TAKEN_OVER = "taken_over"  # decode's first
    DECODING = "decoding"


@dataclass(frozen=True, slots=True)
class NeedPlacement:
    """Choose workers, and answer with ``placed`` or ``unplaced`` at once."""

    needs_decode: bool
    excluded: frozenset[Peer]


@dataclass(frozen=True, slots=True)
class SendReserve:
    """Open the decode leg."""

    peer: Peer
    message: Reserve


@dataclass(frozen=True, slots=True)
class SendPrefill:
    """Open the prefill leg."""

    peer: Peer
    message: Prefill


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Close a leg that may still be open; nothing is lost when ``peer`` cannot be reached any more.

    ``satisfied`` as in ``protocol.messages.Cancel``.
    """

    peer: Peer
    key: RequestKey
    reason: str
    satisfied: bool = False


@dataclass(frozen=True, slots=True)
class Emit:
    """Give the client its next tokens; none when only the end is news.

    Attributes:
        finish_reason: set on the last one.
        stage: where they came from.
        logprobs: one per token, or none.
        prompt_logprobs: with the first token, of the prompt's tokens but the first; where they were asked for.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stage: Stage
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[LogprobTable, ...] = ()


@dataclass(frozen=True, slots=True)
class Blame:
    """One of these workers failed an attempt; which of them, cannot be told. Nothing to do but to note it."""

    peers: frozenset[Peer]
    cause: KVFerryError


@dataclass(frozen=True, slots=True)
class Retry:
    """An attempt failed with ``cause`` and another will follow; nothing to do but to count and log it."""

    cause: KVFerryError
    attempt: int


@dataclass(frozen=True, slots=True)
class Fail:
    """Give the client this error; nothing follows."""

    error: KVFerryError


Instruction = NeedPlacement | SendReserve | SendPrefill | SendCancel | Emit | Blame | Retry | Fail
