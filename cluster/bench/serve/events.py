"""Server-sent events of a streamed completion, as kvferry, vLLM and SGLang write them. Pure."""

from __future__ import annotations

import msgspec

from protocol.errors import MalformedFrame

MAX_LINE = 1 << 20
"""Characters of one event; a token and its usage have a few hundred."""
MAX_KIND = 64
DONE = "[DONE]"


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct, frozen=True):
    """As the server counts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Error(msgspec.Struct, frozen=True):
    code: str | int | None = None
    type: str | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: _Error | None = None


class Piece(msgspec.Struct, frozen=True):
    """What an event brings.

    Attributes:
        tokens: whether there are any in it, be their text empty; the last event often tells the end alone.
        usage: mostly with the last.
    """

    tokens: bool
    usage: Usage | None = None


class EventReader:
    """Lines to pieces.

    Life cycle: :meth:`push` for each line, until ``done`` or ``failed``.

    Attributes:
        done: the end mark has come.
        failed: the kind of error that the server has told, in mid-answer.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed: str | None = None
        self._decoder = msgspec.json.Decoder(_Event)

    def push(self, line: str) -> Piece | None:
        """The piece in ``line``; None for anything that carries none.

        Raises:
            MalformedFrame: it is no event of a completion.
        """
        if self.done or not line.startswith("data:"):
            return None
        data = line[5:].strip()
        if data == DONE:
            self.done = True
            return None
        if len(data) > MAX_LINE:
            raise MalformedFrame(f"an event has {len(data)} characters, over the bound of {MAX_LINE}")
        try:
            event = self._decoder.decode(data)
        except msgspec.DecodeError as error:
            raise MalformedFrame(f"an event does not decode: {error}") from error
        if event.error is not None:
            self.failed = str(event.error.code or event.error.type or "server_error")[:MAX_KIND]
            return None
        return Piece(any(choice.text or choice.finish_reason is None for choice in event.choices), event.usage)
