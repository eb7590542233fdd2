"""The fields that ask for a form: what they come to, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocol.errors import InvalidRequest
from protocol.grammar import MAX_GRAMMAR, Grammar
from router.front.parsing import parse_chat, parse_completion
from router.front.structure import ANY_OBJECT, Form, wanted_form

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def wanted(**fields: Any) -> Form | None:
    return wanted_form(parse_chat(json.dumps({**CHAT, **fields}).encode()))


def grammar_of(form: Form | None) -> Grammar | None:
    return None if form is None else form.grammar


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, ANY_OBJECT),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            Grammar("json_schema", TEXT),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", TEXT)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Grammar("json_schema", json.dumps(SCHEMA))),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", 'b"']}}, Grammar("lark", r'start: "a" | "b\""')),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, Grammar("lark", 'start: "x"')),
        ({"structured_outputs": {}}, None),
        ({"guided_json": SCHEMA}, Grammar("json_schema", TEXT)),
        ({"guided_regex": "[0-9]"}, Grammar("regex", "[0-9]")),
        ({"guided_choice": ["x"]}, Grammar("lark", 'start: "x"')),
        ({"guided_grammar": 'start: "x"'}, Grammar("lark", 'start: "x"')),
    ],
)
def test_a_form_is_a_grammar(fields: dict[str, Any], grammar: Grammar | None) -> None:
    assert grammar_of(wanted(**fields)) == grammar
    body = json.dumps({"model": "m", "prompt": "p", **fields}).encode()
    assert grammar_of(wanted_form(parse_completion(body))) == grammar


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        ({"response_format": "text"}, "response_format", "'text'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "[]"),
        ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs.choice", "1024"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "response_format"),
        ({"guided_regex": "a" * (MAX_GRAMMAR + 1)}, "guided_regex", str(MAX_GRAMMAR)),
    ],
)
def test_what_is_no_form_is_refused_by_name(fields: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wanted(**fields)
    assert caught.value.field == field
    assert says in caught.value.message
