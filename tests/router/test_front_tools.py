"""Tools of chats: what the prompt tells, what the answer says, what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from front_stage import (
    CHAT,
    CHAT_TEMPLATE,
    IM_END,
    MODEL,
    ScriptedService,
    ask,
    events_of,
    one_by_one,
    refused,
    serving_front,
    write_checkpoint,
)
from llguidance import LLMatcher, LLTokenizer

from protocol.errors import ModelError
from router.client import Client, ToolCall
from router.front.config import FrontConfig
from router.tokenizer import Tokenizer

PATH = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "$defs": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
STRICT = [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}, NOW]
ARGUMENTS = '{"city": "Paris"}'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SAID = "the ferry\n" + CALL
NAMED = {"type": "function", "function": {"name": "now"}}
TOOL_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}{{ m.tool_call_id }}\n{% endfor %}"
)


def turns(call_id: str) -> list[dict[str, Any]]:
    call = {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    return [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "sunny"},
    ]


def obeys(service: ScriptedService, checkpoint: Path, text: str) -> bool:
    """Whether ``text`` is what the grammar of the last generation allows."""
    grammar = service.generations[-1].sampling.grammar
    assert grammar is not None
    tokenizer = LLTokenizer((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    matcher = LLMatcher(tokenizer, grammar.source(), log_level=0)
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def service_saying(tokenizer: Tokenizer, text: str) -> ScriptedService:
    return ScriptedService(one_by_one((*tokenizer.encode(text), IM_END), "stop"), max_model_len=4096)


@pytest.fixture
def calling(bpe_tokenizer: Tokenizer) -> ScriptedService:
    return service_saying(bpe_tokenizer, SAID)


@pytest.fixture
def http(bpe_tokenizer: Tokenizer, calling: ScriptedService) -> Iterator[httpx.Client]:
    with serving_front(calling, bpe_tokenizer) as url, httpx.Client(base_url=url, trust_env=False) as http:
        yield http


def test_a_whole_turn_by_openais_library(bpe_tokenizer: Tokenizer, calling: ScriptedService) -> None:
    with (
        serving_front(calling, bpe_tokenizer) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
    ):
        answer = client.chat.completions.create(model=MODEL, messages=CHAT["messages"], tools=TOOLS)
        (choice,) = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "the ferry")
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
        with client.chat.completions.stream(model=MODEL, messages=CHAT["messages"], tools=TOOLS) as stream:
            final = stream.get_final_completion().choices[0]
        assert (final.finish_reason, final.message.content) == ("tool_calls", "the ferry")
        assert final.message.tool_calls is not None
        assert final.message.tool_calls[0].function.arguments == ARGUMENTS
        reply = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        messages = [*CHAT["messages"], choice.message, reply]
        client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, tool_choice="auto")
    prompt = bpe_tokenizer.spell(calling.generations[-1].token_ids)
    assert '<tools>[{"type": "function", "function": {"name": "weather"' in prompt
    assert '<tool_call>[\n{"name": "weather", "arguments": {"city": "Paris"}}\n]</tool_call>' in prompt
    assert "user\n<tool_response>\nsunny\n</tool_response><|im_end|>" in prompt


def test_our_client_has_them_typed(bpe_tokenizer: Tokenizer, calling: ScriptedService) -> None:
    with serving_front(calling, bpe_tokenizer) as url, Client(url) as client:
        answer = client.chat(CHAT["messages"], tools=TOOLS)
        with client.stream(CHAT["messages"], tools=TOOLS) as stream:
            streamed = stream.read()
    for each in (answer, streamed):
        assert (each.text, each.finish_reason) == ("the ferry", "tool_calls")
        assert each.tool_calls == (ToolCall(each.tool_calls[0].id, "weather", ARGUMENTS),)


def test_a_streamed_call_comes_piece_by_piece(http: httpx.Client) -> None:
    body = {**CHAT, "tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}}
    events = events_of(http.post(PATH, json=body))
    choices = [event["choices"][0] for event in events[:-2]]
    first, *pieces = [piece for choice in choices for piece in choice["delta"].get("tool_calls", ())]
    assert first == {
        "index": 0,
        "id": first["id"],
        "type": "function",
        "function": {"name": "weather", "arguments": ""},
    }
    assert first["id"].startswith("call_")
    assert len(pieces) > 3
    assert all(piece == {"index": 0, "function": piece["function"]} for piece in pieces)
    assert "".join(piece["function"]["arguments"] for piece in pieces) == ARGUMENTS
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert events[-2]["usage"]["completion_tokens"] > 0


def test_a_call_that_is_cut_off_ends_as_what_cut_it(bpe_tokenizer: Tokenizer) -> None:
    cut = CALL[: CALL.index("Paris")]
    for reason in ("length", "stop"):
        ids = (*bpe_tokenizer.encode(cut), *[IM_END] * (reason == "stop"))
        service = ScriptedService(one_by_one(ids, reason), max_model_len=4096)
        choice = ask(bpe_tokenizer, service, PATH, {**CHAT, "tools": TOOLS}).json()["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], call["function"]["arguments"]) == (reason, '{"city": "')


def test_the_templates_own_way(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = Tokenizer(write_checkpoint(tmp_path, chat_template=TOOL_TEMPLATE))
    service = service_saying(tokenizer, CALL)
    with serving_front(service, tokenizer) as url, httpx.Client(base_url=url, trust_env=False) as http:
        answer = http.post(PATH, json={**CHAT, "messages": turns("call_1"), "tools": TOOLS}).json()
        message = answer["choices"][0]["message"]
        assert (message["content"], len(message["tool_calls"])) == (None, 1)
        told = http.post("/tokenize", json={"messages": turns("call_1"), "tools": TOOLS}).json()
    prompt = tokenizer.spell(service.generations[-1].token_ids)
    listed = "".join(json.dumps(tool) + "\n" for tool in TOOLS)
    assert prompt == f"{listed}<tool_call>\nuser:the ferry\nassistant:weather(Paris)\ntool:sunnycall_1\n"
    assert tuple(told["tokens"]) == service.generations[-1].token_ids
    reference = AutoTokenizer.from_pretrained(tmp_path)
    messages = turns("call_1")
    messages[1] = {**messages[1], "content": ""}
    messages[1]["tool_calls"][0]["function"]["arguments"] = json.loads(ARGUMENTS)
    assert service.generations[-1].token_ids == tuple(
        reference.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    )


def test_a_template_for_tools_alone(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path, chat_template=None)
    listed = [{"name": "default", "template": CHAT_TEMPLATE}, {"name": "tool_use", "template": "{{ tools | length }}"}]
    (root / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    tokenizer = Tokenizer(root)
    assert tokenizer.spell(tokenizer.encode_chat(CHAT["messages"], tools=TOOLS)) == "2"
    assert tokenizer.encode_chat(CHAT["messages"]) != tokenizer.encode_chat(CHAT["messages"], tools=TOOLS)
    (root / "additional_chat_templates").mkdir()
    (root / "additional_chat_templates" / "tool_use.jinja").write_text("{% if")
    with pytest.raises(ModelError):
        Tokenizer(root)


def test_an_unknown_format_is_refused_unless_named(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_checkpoint(tmp_path, chat_template="{{ tools }}{{ messages[0].content }}"))
    service = service_saying(tokenizer, '{"name": "now", "parameters": {}}')
    body = {**CHAT, "tools": TOOLS}
    with serving_front(service, tokenizer) as url, httpx.Client(base_url=url, trust_env=False) as http:
        assert "tool_format" in refused(http.post(PATH, json=body), 400, "unsupported_field", "tools")
    config = FrontConfig(tool_format="llama3_json")
    with serving_front(service, tokenizer, config) as url, httpx.Client(base_url=url, trust_env=False) as http:
        choice = http.post(PATH, json=body).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["tool_calls"][0]["function"]["name"]) == ("tool_calls", "now")


@pytest.mark.parametrize(
    ("fields", "allowed", "refused_text"),
    [
        ({"tool_choice": "required"}, CALL + "\n" + CALL, "the"),
        ({"tool_choice": "required"}, f"<tool_call>[{CALL[12:-13]}]</tool_call>", CALL.replace("Paris", "Oslo")),
        ({"tool_choice": "required", "parallel_tool_calls": False}, CALL, CALL + "\n" + CALL),
        ({"tool_choice": NAMED}, '<tool_call>{"name": "now", "arguments": {}}</tool_call>', CALL),
        ({"tools": STRICT}, "Hm. <b>\n" + CALL + "\n" + CALL + " so", "Hm." + CALL.replace("Paris", "Oslo")),
        ({"tools": STRICT}, '<tool_call>{"name": "now", "arguments": {"any": [1]}}</tool_call>', "<tool_call> none"),
        ({"tools": STRICT}, "", CALL.replace("weather", "other")),
        ({"tools": STRICT, "parallel_tool_calls": False}, "Hm." + CALL, CALL + CALL),
    ],
)
def test_what_calls_are_held_to_is_a_grammar(
    fields: dict[str, Any],
    allowed: str,
    refused_text: str,
    http: httpx.Client,
    calling: ScriptedService,
    bpe_checkpoint: Path,
) -> None:
    assert http.post(PATH, json={**CHAT, "tools": TOOLS, **fields}).status_code == 200
    assert obeys(calling, bpe_checkpoint, allowed)
    assert not obeys(calling, bpe_checkpoint, refused_text)


def test_a_strict_tool_of_llamas_format(bpe_tokenizer: Tokenizer, bpe_checkpoint: Path) -> None:
    service = service_saying(bpe_tokenizer, "so")
    body = {**CHAT, "tools": STRICT}
    with (
        serving_front(service, bpe_tokenizer, FrontConfig(tool_format="llama3_json")) as url,
        httpx.Client(base_url=url, trust_env=False) as http,
    ):
        assert http.post(PATH, json=body).status_code == 200
    call = '{"name": "weather", "parameters": {"city": "Paris"}}'
    for text, fits in ((call, True), ("so {", True), ("", True), (call.replace("Paris", "Oslo"), False), ("{}", False)):
        assert obeys(service, bpe_checkpoint, text) == fits


def test_without_a_strict_tool_an_answer_is_free(http: httpx.Client, calling: ScriptedService) -> None:
    for tools in (TOOLS, [{**WEATHER, "function": {**WEATHER["function"], "strict": False}}]):
        assert http.post(PATH, json={**CHAT, "tools": tools}).status_code == 200
        assert calling.generations[-1].sampling.grammar is None


def test_one_call_ends_the_answer(bpe_tokenizer: Tokenizer) -> None:
    service = service_saying(bpe_tokenizer, CALL + CALL)
    body = {**CHAT, "tools": TOOLS}
    with serving_front(service, bpe_tokenizer) as url, httpx.Client(base_url=url, trust_env=False) as http:
        both = http.post(PATH, json=body).json()["choices"][0]
        one = http.post(PATH, json={**body, "parallel_tool_calls": False}).json()["choices"][0]
    assert [call["function"]["name"] for call in both["message"]["tool_calls"]] == ["weather", "weather"]
    assert (one["finish_reason"], len(one["message"]["tool_calls"])) == ("tool_calls", 1)
    assert service.counts() == {"opened": 2, "finished": 2, "cancelled": 0}


def test_no_tools_no_calls(http: httpx.Client, calling: ScriptedService, bpe_tokenizer: Tokenizer) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = http.post(PATH, json={**CHAT, **fields}).json()["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", SAID)
        assert "tool_calls" not in choice["message"]
        assert calling.generations[-1].token_ids == bpe_tokenizer.encode_chat(CHAT["messages"])


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": function(name="a b")}, "tools[0].function.name"),
        ({"tools": function(name="f" * 65)}, "tools[0].function.name"),
        ({"tools": function(description="d" * (16385))}, "tools[0].function.description"),
        ({"tools": function(parameters=[])}, "tools[0].function.parameters"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
        ({"tools": function(), "tool_choice": NAMED}, "tool_choice.function.name"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "guided_regex": "a"}, "guided_regex"),
        (
            {"tools": function(parameters={"type": "objectt"}), "tool_choice": "required"},
            "tools[0].function.parameters.type",
        ),
        (
            {"tools": function(parameters={"properties": {"a": {"type": "x"}}}), "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [NOW, *function(parameters={"properties": {"a": {"type": "x"}}}, strict=True)]},
            "tools[1].function.parameters",
        ),
        ({"tools": function(strict="yes")}, "tools[0].function.strict"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        ({"messages": [{**turns("c")[1], "role": "user"}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1]"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, http: httpx.Client) -> None:
    refused(http.post(PATH, json={**CHAT, **fields}), 400, "invalid_request", param)
