"""Finds calls of tools in a text that arrives in pieces.

Life cycle of a :class:`CallParser`: :meth:`~CallParser.push` for each piece, :meth:`~CallParser.flush` once at the end.
What it gives, put together, does not depend on how the text was cut. A call is told of when its name and the bracket of
its arguments are there, and its arguments as they come, as the model writes them; one that is written otherwise, when
its JSON is complete. What is no call of a known tool stays text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, assert_never

import msgspec

from router.front.json_scanner import JsonScanner
from router.tool_format import CALL_END, CALL_START, PYTHON_TAG, KnownFormat

HELD_SPACES = 64
"""White space around the mark of a call that counts as the mark's, at most."""
SPACES = " \t\r\n"

_GAP = r"[ \t\r\n]{0,64}"
_HEAD = re.compile(
    rf'\{{{_GAP}"name"{_GAP}:{_GAP}"(?P<name>[a-zA-Z0-9_-]{{1,64}})"{_GAP},{_GAP}"(?:arguments|parameters)"'
    rf"{_GAP}:{_GAP}(?=\{{)"
)
"""What a call begins with, up to the bracket of its arguments."""
MAX_HEAD = 640
"""Characters of that at most, the bracket included."""

Place = Literal["start", "text", "list", "call", "arguments", "rest", "behind", "gap"]
"""Before any text; in text; between the calls of a list; in a JSON object that may be one; in the arguments of one, and
behind them; behind what was calls; behind its end mark."""


@dataclass(frozen=True)
class ToolCall:
    """One call.

    Attributes:
        id: what the tool's answer will name.
        name: of a tool that the client gave.
        arguments: a JSON object, as the model wrote it.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class CallOpening:
    """A call begins; its arguments follow.

    Attributes:
        index: among the calls of one choice.
        id, name: as in :class:`ToolCall`.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next piece of the arguments of the call with this index."""

    index: int
    text: str


CallDelta = CallOpening | CallArguments


def gathered(deltas: Iterable[CallDelta]) -> tuple[ToolCall, ...]:
    """The calls that ``deltas`` come to."""
    openings: list[CallOpening] = []
    written: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, CallOpening):
            openings.append(delta)
            written.append([])
        else:
            written[delta.index].append(delta.text)
    return tuple(
        ToolCall(opening.id, opening.name, "".join(parts)) for opening, parts in zip(openings, written, strict=True)
    )


class _Written(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


class CallParser:
    """The calls in one choice's text.

    Args:
        form: how the model writes them.
        names: of the tools that there are.

    Attributes:
        count: calls so far.
        complete: those whose arguments have ended.
    """

    def __init__(self, form: KnownFormat, names: Iterable[str]) -> None:
        self._hermes = form == "hermes"
        self._names = frozenset(names)
        self._place: Place = "text" if self._hermes else "start"
        self._held = ""
        # Of what may be a call: what stands before its JSON, how that begins, all of it, where it ends.
        self._opening = ""
        self._head = ""
        self._value: list[str] = []
        self._scanner = JsonScanner()
        self._listed = False
        self.count = 0
        self.complete = 0

    def push(self, piece: str) -> tuple[str, tuple[CallDelta, ...]]:
        """The text to pass on, and what ``piece`` says of calls; what may begin a call is held back."""
        said: list[str] = []
        deltas: list[CallDelta] = []
        rest = piece
        while rest:
            match self._place:
                case "start":
                    rest = self._at_start(rest)
                case "text":
                    rest = self._in_text(rest, said)
                case "list":
                    rest = self._in_list(rest, said)
                case "call":
                    rest = self._in_call(rest, said, deltas)
                case "arguments":
                    rest = self._in_arguments(rest, deltas)
                case "rest":
                    rest = self._in_rest(rest)
                case "behind":
                    rest = self._behind(rest)
                case "gap":
                    rest = rest.lstrip(SPACES)
                    self._place = "text" if rest else "gap"
                case _:
                    assert_never(self._place)
        return "".join(said), tuple(deltas)

    def flush(self) -> str:
        """The text that was held back when the output ended."""
        held = self._opening + "".join(self._value) + self._held
        self._held, self._opening, self._value = "", "", []
        # Behind a call, white space and the beginning of an end mark are the call's.
        return "" if self._place == "behind" or (self.count and not held.strip(SPACES)) else held

    # Each of these takes what has come, and gives what is left for the next place.

    def _at_start(self, piece: str) -> str:
        text, self._held = self._held + piece, ""
        lead = text.lstrip(SPACES)
        body = lead.removeprefix(PYTHON_TAG).lstrip(SPACES)
        if len(text) - len(body) <= HELD_SPACES + len(PYTHON_TAG):
            if body.startswith("{"):
                return self._open(text[: len(text) - len(body)], body)
            if not body or PYTHON_TAG.startswith(lead):
                self._held = text
                return ""
        self._place = "text"
        return text

    def _in_text(self, piece: str, said: list[str]) -> str:
        if not self._hermes:
            said.append(piece)
            return ""
        text, self._held = self._held + piece, ""
        at = text.find(CALL_START)
        if at < 0:
            cut = _before_spaces(text, len(text) - _open_end(text))
            said.append(text[:cut])
            self._held = text[cut:]
            return ""
        behind = at + len(CALL_START)
        body = text[behind:].lstrip(SPACES)
        begin = _before_spaces(text, at)
        if len(text) - len(body) - behind > HELD_SPACES or (body and body[0] not in "{["):
            said.append(text[:behind])
            return text[behind:]
        said.append(text[:begin])
        if not body:
            self._held = text[begin:]
            return ""
        opening = text[begin : len(text) - len(body)]
        if body[0] == "{":
            return self._open(opening, body)
        self._place, self._listed, self._opening = "list", True, opening + "["
        return body[1:]

    def _in_list(self, piece: str, said: list[str]) -> str:
        text = piece.lstrip(SPACES + ",")
        # What stands before the first call is text if there is none.
        opening = self._opening and self._opening + piece[: len(piece) - len(text)]
        if not text:
            self._opening = opening
            return ""
        if text[0] == "{":
            return self._open(opening, text, listed=True)
        self._opening = ""
        if text[0] == "]":
            self._place = "behind"
            return text[1:]
        said.append(opening)
        self._place = "text"
        return text

    def _open(self, opening: str, body: str, *, listed: bool = False) -> str:
        self._place, self._opening, self._listed = "call", opening, listed
        self._head, self._value, self._scanner = "", [], JsonScanner()
        return body

    def _in_call(self, piece: str, said: list[str], deltas: list[CallDelta]) -> str:
        known = len(self._head)
        self._head += piece[: MAX_HEAD - known]
        head = _HEAD.match(self._head)
        if head is not None and head["name"] in self._names:
            self._tell(head["name"], deltas)
            self._place, self._scanner = "arguments", JsonScanner()
            return piece[head.end() - known :]
        end = self._scanner.push(piece)
        self._value.append(piece[:end])
        if end is None:
            return ""
        value = "".join(self._value)
        call = self._call(value)
        if call is None:
            said.append(self._opening + value)
            self._opening, self._value, self._place = "", [], "text"
        else:
            name, arguments = call
            self._tell(name, deltas)
            deltas.append(CallArguments(self.count - 1, arguments))
            self._end()
        return piece[end:]

    def _in_arguments(self, piece: str, deltas: list[CallDelta]) -> str:
        end = self._scanner.push(piece)
        deltas.append(CallArguments(self.count - 1, piece[:end]))
        if end is None:
            return ""
        self.complete += 1
        self._place, self._scanner = "rest", JsonScanner(depth=1)
        return piece[end:]

    def _in_rest(self, piece: str) -> str:
        end = self._scanner.push(piece)
        if end is None:
            return ""
        self._place = "list" if self._listed else "behind"
        return piece[end:]

    def _behind(self, piece: str) -> str:
        text, self._held = (self._held + piece).lstrip(SPACES), ""
        # Llama parts its calls by semicolons. Some models leave the mark out.
        mark = CALL_END if self._hermes else ";"
        if text.startswith("{"):
            return self._open("", text)
        if text.startswith(mark) and self._hermes:
            self._place = "gap"
            return text[len(mark) :]
        body = text.removeprefix(mark).lstrip(SPACES)
        if body.startswith("{"):
            return self._open("; ", body)
        if mark.startswith(text) or not body:
            self._held = text.rstrip(SPACES)
            return ""
        self._place = "text"
        return mark + body if text.startswith(mark) else text

    def _tell(self, name: str, deltas: list[CallDelta]) -> None:
        deltas.append(CallOpening(self.count, "call_" + secrets.token_hex(12), name))
        self.count += 1
        self._opening, self._value = "", []

    def _end(self) -> None:
        self.complete += 1
        self._place = "list" if self._listed else "behind"

    def _call(self, value: str) -> tuple[str, str] | None:
        """Name and arguments of the call that a JSON object is; None where it is something else."""
        try:
            written = msgspec.json.decode(value, type=_Written)
            arguments = _object_text(written.arguments or written.parameters)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        return (written.name, arguments) if written.name in self._names else None


def _object_text(raw: msgspec.Raw) -> str:
    """The JSON object in ``raw``, which may be one, text that holds one, or nothing.

    Raises:
        msgspec.DecodeError: it is something else.
    """
    text = bytes(raw).decode()
    value = msgspec.json.decode(text) if text else None
    if value is None:
        return "{}"
    if isinstance(value, str):
        msgspec.json.decode(value, type=dict[str, object])
        return value
    msgspec.json.decode(text, type=dict[str, object])
    return text


def _before_spaces(text: str, end: int) -> int:
    """Where the white space before ``end`` begins, as far as it counts."""
    return max(len(text[:end].rstrip(SPACES)), end - HELD_SPACES)


def _open_end(text: str) -> int:
    """Length of the longest end of ``text`` that begins a mark."""
    sizes = range(min(len(CALL_START) - 1, len(text)), 0, -1)
    return next((size for size in sizes if CALL_START.startswith(text[-size:])), 0)
