"""The tools of one request: what the prompt tells of them, how calls are found, and what holds the model to them."""

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
            raise InvalidRequest(
                f"tool_choice is allowed only with tools, got {shown(msgspec.to_builtins(choice))}", field="tool_choice"
            )
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
        """What holds calls to their schemas, after its parts: the arguments of each function that has one.

        Where a call must be made the answer is calls, of any function's schema; otherwise it is any text, and where a
        call begins in it that follows the schemas of functions that are ``strict``. Empty where nothing is held.

        Raises:
            InvalidRequest: a tool's parameters cannot be used so; names the field.
        """
        if not self.forced and not any(function.strict for function in self.callable):
            return ()
        arguments = "arguments" if form == "hermes" else "parameters"
        rules: list[str] = []
        parts: list[Form] = []
        names = [tool.function.name for tool in self.tools]
        for place, function in enumerate(self.callable):
            schema = '{"type": "object"}'
            if self.forced or function.strict:
                part = _arguments(function, f"tools[{names.index(function.name)}].function.parameters")
                parts.append(part)
                schema = part.grammar.text
            before = msgspec.json.encode(f'{{"name": "{function.name}", "{arguments}": ').decode()
            rules += [f'f{place}: {before} a{place} "}}"', f"a{place}: %json {schema}"]
        rules.append("function: " + " | ".join(f"f{place}" for place in range(len(self.callable))))
        rules += self._hermes_rules() if form == "hermes" else self._llama_rules()
        return (*parts, Form(Grammar("lark", "\n".join(rules)), "tools"))

    def _hermes_rules(self) -> list[str]:
        more = 0 if self.single else MAX_FORCED_CALLS - 1
        listed = f"function (/,[ \\n]?/ function){{0,{more}}}" if more else "function"
        rules = [
            f'body: function | "[" /[ \\n]?/ {listed} /[ \\n]?/ "]"',
            f'inside: /[ \\n]?/ body /[ \\n]?/ "{CALL_END}"',
        ]
        if self.forced:
            rules.append(f'call: "{CALL_START}" inside')
            return [*rules, f"start: call (/[ \\n]?/ call){{0,{more}}}" if more else "start: call"]
        # The text before a call ends where its mark does.
        return [
            *rules,
            r"TEXT: /(.|\n)*/",
            f'mark[lazy]: TEXT "{CALL_START}"',
            "ending: TEXT",
            "start: ending | mark inside" if self.single else "start: (mark inside)* ending",
        ]

    def _llama_rules(self) -> list[str]:
        # Its template takes one call alone, which is the whole answer.
        if self.forced:
            return ["start: function"]
        return [r"TEXT: /[^{< \t\r\n](.|\n)*/", "start: (function | TEXT)?"]

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


def _arguments(function: ToolFunction, field: str) -> Form:
    """What the arguments of ``function`` must look like; raises InvalidRequest where they could be no object."""
    schema = NO_PARAMETERS if function.parameters is None else {"type": "object", **function.parameters}
    if schema["type"] != "object":
        raise InvalidRequest(f"{field}.type must be 'object', got {shown(schema['type'])}", field=f"{field}.type")
    return Form(Grammar("json_schema", msgspec.json.encode(schema).decode()), field)


def told_tools(tools: list[Tool] | tuple[Tool, ...]) -> list[dict[str, Any]]:
    """Tools as chat templates take them."""
    return [msgspec.to_builtins(tool) for tool in tools]
