"""Log-probabilities of a prompt's own tokens, as a prefill worker tells them: packed, for a prompt may be long."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated

import msgspec

from protocol.errors import MalformedFrame
from protocol.ids import RequestKey
from protocol.sampling import MAX_LOGPROBS

MAX_POSITIONS = 1024
"""Most prompt tokens that one message tells of."""
MAX_START = 1 << 20
_NUMBER = 4
"""Bytes of a number: a little-endian float32, or an unsigned integer as wide."""

Column = Annotated[bytes, msgspec.Meta(min_length=_NUMBER, max_length=MAX_POSITIONS * _NUMBER)]
Grid = Annotated[bytes, msgspec.Meta(max_length=MAX_POSITIONS * MAX_LOGPROBS * _NUMBER)]


class LogprobRow(msgspec.Struct, frozen=True, array_like=True):
    """Of one prompt token, under the model's own logits.

    Attributes:
        logprob: of the token that stands there.
        rank: its place among all tokens, 1 for the most likely.
        top: ``(token id, log-probability)`` of the most likely tokens, highest first.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class LogprobTable(msgspec.Struct, frozen=True, array_like=True):
    """Of some prompt tokens that follow each other; ``N`` of them, with ``width`` alternatives each.

    Attributes:
        width: alternatives of each.
        logprobs: N floats, of the tokens that stand there.
        ranks: N integers, their places.
        top_ids: N x width integers.
        top_logprobs: N x width floats, highest first in each row.

    Raises:
        MalformedFrame: the columns are not of one length.
    """

    width: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
    logprobs: Column
    ranks: Column
    top_ids: Grid
    top_logprobs: Grid

    def __post_init__(self) -> None:
        size = len(self.logprobs)
        grid = size * self.width
        found = (len(self.ranks), len(self.top_ids), len(self.top_logprobs))
        if size % _NUMBER or found != (size, grid, grid):
            raise MalformedFrame(f"a table of {size} bytes and width {self.width} has columns of {found} bytes")

    def __len__(self) -> int:
        return len(self.logprobs) // _NUMBER

    def rows(self) -> Iterator[LogprobRow]:
        """Each token's row, in order."""
        ids = struct.unpack(f"<{len(self) * self.width}I", self.top_ids)
        values = struct.unpack(f"<{len(self) * self.width}f", self.top_logprobs)
        own = zip(struct.iter_unpack("<f", self.logprobs), struct.iter_unpack("<I", self.ranks), strict=True)
        for row, ((logprob,), (rank,)) in enumerate(own):
            at = slice(row * self.width, (row + 1) * self.width)
            yield LogprobRow(logprob, rank, tuple(zip(ids[at], values[at], strict=True)))


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True, tag="prompt_logprobs"):
    """Prefill to router: what the model thinks of a piece of the prompt. All of them come before the first token.

    Attributes:
        key: request and attempt.
        start: index in the prompt of the first token told of, at least 1: nothing stands before token 0.
        table: one row per token.
    """

    key: RequestKey
    start: Annotated[int, msgspec.Meta(ge=1, le=MAX_START)]
    table: LogprobTable
