"""The tools of one request: what the prompt tells of them, how calls are found, and what makes the model call one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from protocol.errors import InvalidRequest
from protocol.grammar import Grammar
from router.front.parsing import shown
from router.front.schema import ChatRequest, NamedTool, Tool, ToolFunction
from router.front.structure import Form
from router.front.tool_calls import CallParser
from router.tool_format import CALL_END, CALL_START, KnownFormat

MAX_FORCED_CALLS = 32
"""Calls in one answer at most, where there must be one."""
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Toolbox:
    """The tools that a model may call.

    Attributes:
        tools: all that the prompt tells of.
        callable: those that may be called.
        forced: whether one must be.
        single: whether at most one call is wanted.
    """

    tools: tuple[Tool, ...]
    callable: tuple[ToolFunction, ...]
    forced: bool
    single: bool

    @staticmethod
    def of(request: ChatRequest) -> Toolbox | None:
        """What ``request`` asks for; None where no tool may be called.

        Raises:
            InvalidRequest: two tools have one name, or ``tool_choice`` names none of them; names the field.
        """
        tools = request.tools or []
        choice = request.tool_choice
        if not tools and choice not in (None, "none", "auto"):
            raise InvalidRequest(f"tool_choice is allowed only with tools, got {shown(choice)}", field="tool_choice")
        seen: dict[str, ToolFunction] = {}
        for index, tool in enumerate(tools):
            if tool.function.name in seen:
                field = f"tools[{index}].function.name"
                raise InvalidRequest(f"{field} {shown(tool.function.name)} is another tool's as well", field=field)
            seen[tool.function.name] = tool.function
        if not tools or choice == "none":
            return None
        if isinstance(choice, NamedTool):
            named = seen.get(choice.function.name)
            if named is None:
                field = "tool_choice.function.name"
                raise InvalidRequest(f"{field} {shown(choice.function.name)} is none of the tools", field=field)
            return Toolbox(tuple(tools), (named,), forced=True, single=True)
        single = request.parallel_tool_calls is False
        return Toolbox(tuple(tools), tuple(seen.values()), forced=choice == "required", single=single)

    def told(self) -> list[dict[str, Any]]:
        """As chat templates take them."""
        return told_tools(self.tools)

    def forms(self, form: KnownFormat) -> tuple[Form, ...]:
        """What makes the answer a call, where it must be one, after its parts: each function's arguments.

        Raises:
            InvalidRequest: a tool's parameters cannot be used so; names the field.
        """
        if not self.forced:
            return ()
        arguments = "arguments" if form == "hermes" else "parameters"
        rules: list[str] = []
        parts: list[Form] = []
        names = [tool.function.name for tool in self.tools]
        for place, function in enumerate(self.callable):
            field = f"tools[{names.index(function.name)}].function.parameters"
            schema = NO_PARAMETERS if function.parameters is None else {"type": "object", **function.parameters}
            if schema["type"] != "object":
                raise InvalidRequest(
                    f"{field}.type must be 'object', got {shown(schema['type'])}", field=f"{field}.type"
                )
            text = msgspec.json.encode(schema).decode()
            parts.append(Form(Grammar("json_schema", text), field))
            before = msgspec.json.encode(f'{{"name": "{function.name}", "{arguments}": ').decode()
            rules += [f'f{place}: {before} a{place} "}}"', f"a{place}: %json {text}"]
        rules.append("function: " + " | ".join(f"f{place}" for place in range(len(self.callable))))
        # Llama's template takes one call alone.
        more = 0 if self.single or form != "hermes" else MAX_FORCED_CALLS - 1
        if form == "hermes":
            listed = f"function (/,[ \\n]?/ function){{0,{more}}}" if more else "function"
            rules += [
                f'body: function | "[" /[ \\n]?/ {listed} /[ \\n]?/ "]"',
                f'call: "{CALL_START}" /[ \\n]?/ body /[ \\n]?/ "{CALL_END}"',
                f"start: call (/[ \\n]?/ call){{0,{more}}}" if more else "start: call",
            ]
        else:
            rules.append("start: function")
        return (*parts, Form(Grammar("lark", "\n".join(rules)), "tools"))

    def reading(self, form: KnownFormat) -> CallReading:
        """How calls are found in each choice."""
        return CallReading(form, tuple(function.name for function in self.callable), self.single)


@dataclass(frozen=True)
class CallReading:
    """How calls are found.

    Attributes:
        form: how the model writes them.
        names: of the tools that there are.
        single: whether the answer ends with the first.
    """

    form: KnownFormat
    names: tuple[str, ...]
    single: bool

    def parser(self) -> CallParser:
        """For one choice."""
        return CallParser(self.form, self.names)


def told_tools(tools: list[Tool] | tuple[Tool, ...]) -> list[dict[str, Any]]:
    """Tools as chat templates take them."""
    return [msgspec.to_builtins(tool) for tool in tools]
