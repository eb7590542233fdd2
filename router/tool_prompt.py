"""Tells of tools, their calls and answers in plain turns, for chat templates that know nothing of tools.

The words are those of SmolLM2's documentation, the model that is shipped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.tool_format import CALL_END, CALL_START

INSTRUCTION = """You are an expert in composing functions. You are given a question and a set of possible functions.
Based on the question, you will need to make one or more function/tool calls to achieve the purpose.
If none of the functions can be used, point it out and refuse to answer.
If the given question lacks the parameters required by the function, also point it out.

You have access to the following tools:
<tools>{tools}</tools>

The output MUST strictly adhere to the following format, and NO other text MUST be included.
The example format is as follows. Please make sure the parameter type is correct. If no function call is needed, \
please make the tool calls an empty list '[]'.
<tool_call>[
{{"name": "func_name1", "arguments": {{"argument1": "value1", "argument2": "value2"}}}},
... (more tool calls as required)
]</tool_call>"""

Turn = Mapping[str, Any]


def plain_turns(messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """``messages`` with nothing but text in them: the tools in the system's turn, their answers in the user's."""
    turns: list[Turn] = []
    answering = False
    for message in messages:
        if message["role"] == "tool":
            answer = f"<tool_response>\n{message['content']}\n</tool_response>"
            # Many templates want user and assistant to take turns.
            if answering:
                turns[-1] = {**turns[-1], "content": f"{turns[-1]['content']}\n{answer}"}
            else:
                turns.append({"role": "user", "content": answer})
        elif message.get("tool_calls"):
            text = "\n".join(filter(None, (message["content"], _written(message["tool_calls"]))))
            turns.append({"role": message["role"], "content": text})
        else:
            turns.append(message)
        answering = message["role"] == "tool"
    if tools:
        instruction = INSTRUCTION.format(tools=json.dumps(list(tools), ensure_ascii=False))
        if turns and turns[0]["role"] == "system":
            turns[0] = {**turns[0], "content": f"{turns[0]['content']}\n\n{instruction}"}
        else:
            turns.insert(0, {"role": "system", "content": instruction})
    return turns


def _written(calls: Sequence[Turn]) -> str:
    every = ",\n".join(json.dumps(dict(call["function"]), ensure_ascii=False) for call in calls)
    return f"{CALL_START}[\n{every}\n]{CALL_END}"
