"""Calls of tools in a model's text: what is one, what is not, and that cuts change nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.front.tool_calls import CallArguments, CallDelta, CallOpening, CallParser, ToolCall, gathered
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


def read(form: KnownFormat, pieces: list[str]) -> tuple[str, tuple[ToolCall, ...], int]:
    """Text, calls, and how many of them are complete."""
    parser = CallParser(form, NAMES)
    said: list[str] = []
    deltas: list[CallDelta] = []
    for piece in pieces:
        text, found = parser.push(piece)
        said.append(text)
        deltas += found
    said.append(parser.flush())
    openings = [delta.index for delta in deltas if isinstance(delta, CallOpening)]
    assert openings == list(range(parser.count))
    assert [delta.index for delta in deltas] == sorted(delta.index for delta in deltas)
    assert parser.count - 1 <= parser.complete <= parser.count or parser.count == 0
    return "".join(said), gathered(deltas), parser.complete


def same(form: KnownFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]], int]:
    """As :func:`read`, without the ids, which are drawn."""
    text, calls, complete = read(form, pieces)
    assert len({call.id for call in calls}) == len(calls)
    return text, [(call.name, call.arguments) for call in calls], complete


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
        assert same(form, pieces) == (said, calls, len(calls))


@pytest.mark.parametrize(
    ("text", "said", "calls", "complete"),
    [
        ('<tool_call>{"name": "weather", "arguments": {"city": "Par', "", [("weather", '{"city": "Par')], 0),
        ('<tool_call>{"name": "weather", "arguments": {city: [}]}', "", [("weather", "{city: [}]")], 1),
        ('<tool_call>[{"name": "now"}, {"name": "other"}]', '{"name": "other"}]', [("now", "{}")], 1),
        ('<tool_call>[{"name": "now"}, 3]', "3]", [("now", "{}")], 1),
        (
            '<tool_call> [ {"name": "other"}, {"name": "now"}]',
            '<tool_call> [ {"name": "other"}, {"name": "now"}]',
            [],
            0,
        ),
        ('<tool_call>{"arguments": {}, "name": "now"}</tool_call>', "", [("now", "{}")], 1),
        ('<tool_call>{"name": "now", "arguments": {}, "id": "}"}</tool_call>\nso', "so", [("now", "{}")], 1),
        ('<tool_call>{"name":"now","arguments":{}', "", [("now", "{}")], 1),
    ],
)
def test_what_was_begun_stays_a_call(text: str, said: str, calls: list[tuple[str, str]], complete: int) -> None:
    for pieces in ([text], list(text)):
        assert same("hermes", pieces) == (said, calls, complete)


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
def test_arguments_come_as_they_are_written(form: KnownFormat) -> None:
    parser = CallParser(form, NAMES)
    mark = "<tool_call>" if form == "hermes" else ""
    told = [
        parser.push(piece)
        for piece in (mark, '{"name": "wea', 'ther", "argum', 'ents": ', '{"ci', 'ty": "Pa', 'ris"}', "}")
    ]
    assert all(text == "" for text, _ in told)
    opening, *_ = told[4][1]
    assert isinstance(opening, CallOpening)
    assert (opening.index, opening.name) == (0, "weather")
    assert [deltas for _, deltas in told] == [
        (),
        (),
        (),
        (),
        (opening, CallArguments(0, '{"ci')),
        (CallArguments(0, 'ty": "Pa'),),
        (CallArguments(0, 'ris"}'),),
        (),
    ]


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
    assert same(form, pieces) == same(form, [text]) == same(form, list(text))


def test_no_half_of_a_mark_is_text() -> None:
    parser = CallParser("hermes", NAMES)
    assert [parser.push(piece)[0] for piece in ("so ", "<tool", "_call", ">\n{", '"name": "now"}')] == ["so"] + [""] * 4
    assert parser.count == 1
