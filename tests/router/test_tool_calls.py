"""Calls of tools in a model's text: what is one, what is not, and that cuts change nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.front.tool_calls import CallParser, ToolCall
from router.tool_format import KnownFormat

NAMES = ("weather", "now")
PARIS = '{"city": "Paris"}'
PARTS = [
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    '{"name": "weather", "arguments": {"city": "Paris"}}',
    '{"name": "now", "parameters": {}}',
    '[{"name": "now"}, {"name": "weather", "arguments": "{}"}]',
    '{"name": "other", "arguments": {}}',
    '{"name": "weather", "arguments": {"city": "}</tool_call>\\"{"}}',
    "[]",
    "{",
    '"',
    "\\",
    "; ",
    "\n",
    " " * 70,
    "<tool",
    "text",
]


def read(form: KnownFormat, pieces: list[str]) -> tuple[str, list[ToolCall]]:
    parser = CallParser(form, NAMES)
    said: list[str] = []
    calls: list[ToolCall] = []
    for piece in pieces:
        text, found = parser.push(piece)
        said.append(text)
        calls += found
    said.append(parser.flush())
    assert parser.count == len(calls)
    return "".join(said), calls


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>', "", [("weather", PARIS)]),
        ("hermes", 'Hm.\n<tool_call>{"name": "now", "arguments": {}}', "Hm.", [("now", "{}")]),
        (
            "hermes",
            '<tool_call>{"name": "now"}</tool_call>\n<tool_call>{"name": "now", "arguments": null}</tool_call>\n',
            "",
            [("now", "{}"), ("now", "{}")],
        ),
        (
            "hermes",
            f'<tool_call>[\n{{"name": "now"}},\n{{"name": "weather", "arguments": {PARIS}}}\n]</tool_call>',
            "",
            [("now", "{}"), ("weather", PARIS)],
        ),
        ("hermes", "<tool_call>[]</tool_call>", "", []),
        ("hermes", '{"name": "now", "arguments": {}}', '{"name": "now", "arguments": {}}', []),
        ("hermes", "a <tool_call>", "a <tool_call>", []),
        ("hermes", "a <tool", "a <tool", []),
        ("hermes", "<tool_call> none </tool_call>", "<tool_call> none </tool_call>", []),
        ("hermes", '<tool_call>{"name": "no', '<tool_call>{"name": "no', []),
        ("hermes", '<tool_call>{"name": "other"}</tool_call>', '<tool_call>{"name": "other"}</tool_call>', []),
        ("hermes", '<tool_call>{"name": now}</tool_call>', '<tool_call>{"name": now}</tool_call>', []),
        ("hermes", '<tool_call>{"name": "now", "arguments": 3}', '<tool_call>{"name": "now", "arguments": 3}', []),
        ("hermes", "<tool_call>" + "[" * 5000 + "]" * 5000, "<tool_call>" + "[" * 5000 + "]" * 5000, []),
        ("llama3_json", f'{{"name": "weather", "parameters": {PARIS}}}', "", [("weather", PARIS)]),
        ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}', "", [("now", "{}")]),
        (
            "llama3_json",
            '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
            "",
            [("now", "{}"), ("now", "{}")],
        ),
        ("llama3_json", '{"name": "now", "parameters": {}}; so', ";so", [("now", "{}")]),
        ("llama3_json", '{"a": 1}', '{"a": 1}', []),
        ("llama3_json", 'It is {"name": "now"}', 'It is {"name": "now"}', []),
        ("llama3_json", "<|python", "<|python", []),
    ],
)
def test_what_is_a_call(form: KnownFormat, text: str, said: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text)):
        found, called = read(form, pieces)
        assert found == said
        assert [(call.name, call.arguments) for call in called] == calls
        assert [call.index for call in called] == list(range(len(calls)))
        assert len({call.id for call in called}) == len(calls)


@settings(deadline=None)
@given(
    form=st.sampled_from(["hermes", "llama3_json"]),
    parts=st.lists(st.sampled_from(PARTS), max_size=10),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=20),
)
def test_cuts_change_nothing(form: KnownFormat, parts: list[str], sizes: list[int]) -> None:
    text = "".join(parts)
    pieces, at, turn = [], 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        pieces.append(text[at : at + size])
        at, turn = at + size, turn + 1
    assert read(form, pieces) == read(form, [text]) == read(form, list(text))


def test_no_half_of_a_mark_is_text() -> None:
    parser = CallParser("hermes", NAMES)
    assert [parser.push(piece)[0] for piece in ("so ", "<tool", "_call", ">\n{", '"name": "now"}')] == ["so"] + [""] * 4
    assert parser.count == 1
