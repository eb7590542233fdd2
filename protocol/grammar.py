"""What an output must look like, as it travels with the sampling settings."""

from __future__ import annotations

from typing import Annotated, Literal, assert_never

import msgspec

from protocol.errors import InvalidRequest

MAX_GRAMMAR = 64 << 10
"""Bytes of one grammar at most."""

GrammarKind = Literal["json_schema", "regex", "lark"]


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """One grammar.

    Attributes:
        kind: how ``text`` is to be read: a JSON schema, a regular expression in Rust's syntax, or llguidance's Lark.
        text: at most :data:`MAX_GRAMMAR` bytes.
    """

    kind: GrammarKind
    text: Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR)]

    def source(self) -> str:
        """As llguidance reads it."""
        from llguidance import LLMatcher  # for those who compile or check one, which no client does

        match self.kind:
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(self.text)
            case "regex":
                return LLMatcher.grammar_from_regex(self.text)
            case "lark":
                return LLMatcher.grammar_from_lark(self.text)
            case _:
                assert_never(self.kind)

    def check(self, field: str) -> None:
        """Raise InvalidRequest, with the name of the ``field`` that it came by, where it is no grammar."""
        from llguidance import LLMatcher

        if len(self.text.encode()) > MAX_GRAMMAR:
            raise InvalidRequest(f"{field} must be at most {MAX_GRAMMAR} bytes", field=field)
        try:
            reason = LLMatcher.validate_grammar(self.source())
        except ValueError as error:
            reason = str(error)
        if reason:
            raise InvalidRequest(f"{field} cannot be used: {reason}", field=field)
