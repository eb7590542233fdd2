"""Finds calls of tools in a text that arrives in pieces.

Life cycle of a :class:`CallParser`: :meth:`~CallParser.push` for each piece, :meth:`~CallParser.flush` once at the end.
What it gives, put together, does not depend on how the text was cut. A call is given when its JSON is complete; what
is no call of a known tool stays text.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, assert_never

import msgspec

from router.front.json_scanner import JsonScanner
from router.tool_format import CALL_END, CALL_START, PYTHON_TAG, KnownFormat

HELD_SPACES = 64
"""White space around the mark of a call that counts as the mark's, at most."""
SPACES = " \t\r\n"

Place = Literal["start", "text", "json", "behind", "gap"]
"""Before any text; in text; in a JSON value; behind one that was calls; behind its end mark."""


def _call_id() -> str:
    return "call_" + secrets.token_hex(12)


@dataclass(frozen=True)
class ToolCall:
    """One call.

    Attributes:
        index: among the calls of one choice.
        name: of a tool that the client gave.
        arguments: a JSON object, as the model wrote it.
        id: what the tool's answer will name.
    """

    index: int
    name: str
    arguments: str
    id: str = field(default_factory=_call_id, compare=False)


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
    """

    def __init__(self, form: KnownFormat, names: Iterable[str]) -> None:
        self._hermes = form == "hermes"
        self._names = frozenset(names)
        self._place: Place = "text" if self._hermes else "start"
        self._held = ""
        self._opening = ""
        self._value: list[str] = []
        self._scanner = JsonScanner()
        self.count = 0

    def push(self, piece: str) -> tuple[str, tuple[ToolCall, ...]]:
        """The text to pass on, and the calls that ``piece`` completes; what may begin a call is held back."""
        said: list[str] = []
        calls: list[ToolCall] = []
        rest = piece
        while rest:
            match self._place:
                case "start":
                    rest = self._at_start(rest)
                case "text":
                    rest = self._in_text(rest, said)
                case "json":
                    rest = self._in_json(rest, said, calls)
                case "behind":
                    rest = self._behind(rest)
                case "gap":
                    rest = rest.lstrip(SPACES)
                    self._place = "text" if rest else "gap"
                case _:
                    assert_never(self._place)
        return "".join(said), tuple(calls)

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
        if body:
            return self._open(text[begin : len(text) - len(body)], body)
        self._held = text[begin:]
        return ""

    def _open(self, opening: str, body: str) -> str:
        self._place, self._opening, self._scanner = "json", opening, JsonScanner()
        return body

    def _in_json(self, piece: str, said: list[str], calls: list[ToolCall]) -> str:
        end = self._scanner.push(piece)
        self._value.append(piece[:end])
        if end is None:
            return ""
        text, value = self._opening, "".join(self._value)
        self._opening, self._value = "", []
        found = self._calls(value)
        if found is None:
            said.append(text + value)
            self._place = "text"
        else:
            calls += found
            self.count += len(found)
            self._place = "behind"
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

    def _calls(self, value: str) -> list[ToolCall] | None:
        """The calls in a JSON value; None where it is something else."""
        try:
            written = msgspec.json.decode(value, type=list[_Written] | _Written)
            every = written if isinstance(written, list) else [written]
            arguments = [_object_text(call.arguments or call.parameters) for call in every]
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        if any(call.name not in self._names for call in every):
            return None
        pairs = zip(every, arguments, strict=True)
        return [ToolCall(self.count + at, call.name, text) for at, (call, text) in enumerate(pairs)]


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
