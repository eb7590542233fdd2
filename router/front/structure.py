"""The form that a request wants its answer in, as a grammar; OpenAI's field for it, and vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from protocol.errors import InvalidRequest
from protocol.grammar import MAX_GRAMMAR, Grammar
from router.front.schema import GenerationRequest, ResponseFormat

ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer must look like.

    Attributes:
        grammar: of it; nobody has looked yet whether it can be used.
        field: that it came by.

    Raises:
        InvalidRequest: it is too long; names the field.
    """

    grammar: Grammar
    field: str

    def __post_init__(self) -> None:
        if len(self.grammar.text) > MAX_GRAMMAR:
            raise InvalidRequest(f"{self.field} must be at most {MAX_GRAMMAR} characters", field=self.field)


def wanted_form(request: GenerationRequest) -> Form | None:
    """The form that ``request`` asks for, or None.

    Raises:
        InvalidRequest: it asks for two, or for one that is too long; names the field.
    """
    given = [(field, grammar) for field, grammar in _asked(request) if grammar is not None]
    if not given:
        return None
    field, grammar = given[0]
    if len(given) > 1:
        raise InvalidRequest(f"{given[1][0]} must not be given with {field}: an answer has one form", field=given[1][0])
    return Form(grammar, field)


def refuse_forms(request: GenerationRequest) -> None:
    """Refuse a form in a request with tools, which have one of their own.

    Raises:
        InvalidRequest: names the field that asks for one.
    """
    for field, grammar in _asked(request):
        if grammar is not None:
            raise InvalidRequest(f"{field} must not be given with tools: an answer has one form", field=field)


def _asked(request: GenerationRequest) -> list[tuple[str, Grammar | None]]:
    structured = request.structured_outputs
    ways = (
        []
        if structured is None
        else [
            ("structured_outputs.json", _schema(structured.json)),
            ("structured_outputs.regex", _text("regex", structured.regex)),
            ("structured_outputs.choice", _choice(structured.choice)),
            ("structured_outputs.grammar", _text("lark", structured.grammar)),
        ]
    )
    return [
        _format(request.response_format),
        *ways,
        ("guided_json", _schema(request.guided_json)),
        ("guided_regex", _text("regex", request.guided_regex)),
        ("guided_choice", _choice(request.guided_choice)),
        ("guided_grammar", _text("lark", request.guided_grammar)),
    ]


def _format(given: ResponseFormat | None) -> tuple[str, Grammar | None]:
    if given is None or given.type == "text":
        return "response_format", None
    if given.type == "json_object":
        return "response_format", ANY_OBJECT
    field = "response_format.json_schema"
    if given.json_schema is None:
        raise InvalidRequest(f"{field} is required with type json_schema", field=field)
    schema = given.json_schema.schema
    return f"{field}.schema", ANY_OBJECT if schema is None else _schema(schema)


def _schema(schema: object) -> Grammar | None:
    if schema is None:
        return None
    return Grammar("json_schema", schema if isinstance(schema, str) else msgspec.json.encode(schema).decode())


def _text(kind: Literal["regex", "lark"], text: str | None) -> Grammar | None:
    return None if text is None else Grammar(kind, text)


def _choice(choices: Sequence[str] | None) -> Grammar | None:
    if choices is None:
        return None
    return Grammar("lark", "start: " + " | ".join(msgspec.json.encode(choice).decode() for choice in choices))
