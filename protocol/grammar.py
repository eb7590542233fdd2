"""What an output must look like, as it travels with the sampling settings."""

from __future__ import annotations

from typing import Annotated, Literal, assert_never

import msgspec

MAX_GRAMMAR = 64 << 10
"""Characters of one grammar at most."""

GrammarKind = Literal["json_schema", "regex", "lark"]


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """One grammar.

    Attributes:
        kind: how ``text`` is to be read: a JSON schema, a regular expression in Rust's syntax, or llguidance's Lark.
        text: at most :data:`MAX_GRAMMAR` characters.
    """

    kind: GrammarKind
    text: Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR)]

    def source(self) -> str:
        """As llguidance reads it."""
        from llguidance import LLMatcher  # for those who compile one, which no client does

        match self.kind:
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(self.text)
            case "regex":
                return LLMatcher.grammar_from_regex(self.text)
            case "lark":
                return LLMatcher.grammar_from_lark(self.text)
            case _:
                assert_never(self.kind)
