"""Calls of tools, as the client gives them back: whole, and as the pieces of a stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; ``arguments`` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolCallDelta:
    """The next piece of a call in a stream.

    Attributes:
        index: among the calls of one choice.
        arguments: the next part of their text.
        id, name: on the first piece of each call; "" on others.
    """

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class WrittenCall(msgspec.Struct):
    """A call, or a piece of one, in the router's JSON."""

    index: int = 0
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)

    def to_call(self) -> ToolCall:
        """As a whole one."""
        return ToolCall(self.id or "", self.function.name or "", self.function.arguments or "")

    def to_delta(self) -> ToolCallDelta:
        """As a piece."""
        return ToolCallDelta(self.index, self.function.arguments or "", self.id or "", self.function.name or "")


def joined_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """The calls that all ``deltas`` of a choice come to, by their index."""
    pieces: dict[int, list[ToolCallDelta]] = {}
    for delta in deltas:
        pieces.setdefault(delta.index, []).append(delta)
    return tuple(
        ToolCall(
            id=next((piece.id for piece in call if piece.id), ""),
            name=next((piece.name for piece in call if piece.name), ""),
            arguments="".join(piece.arguments for piece in call),
        )
        for _, call in sorted(pieces.items())
    )
