"""Renders a checkpoint's Jinja chat template in a sandbox, to the text that transformers would give."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protocol.errors import InvalidRequest, ModelError
from router.tool_format import format_of
from router.tool_prompt import plain_turns

Message = Mapping[str, Any]
"""``role``, ``content`` and, where there are any, ``name``, ``tool_calls`` and ``tool_call_id``."""


class GenerationTag(Extension):
    """``{% generation %} ... {% endgeneration %}``, which marks the assistant's text for training: renders its body."""

    tags = {"generation"}  # noqa: RUF012 -- the name and type that Jinja looks for

    def parse(self, parser: Parser) -> Node:
        """The node of one such block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which a model has never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled template.

    Args:
        source: the Jinja text.
        special_tokens: what the template may name, such as ``bos_token`` and ``eos_token``.

    Attributes:
        knows_tools: whether it does anything with tools.
        tool_format: how it asks the model to write calls; None where it does not know tools, or in an unknown way.

    Raises:
        ModelError: the template does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self.knows_tools = any(kind == "name" and text == "tools" for _, kind, text in environment.lex(source))
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template does not compile: {error}") from error
        self.tool_format = format_of(source) if self.knows_tools else None
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt's text; a template that knows no tools is told of them, and of their calls, in plain turns.

        Raises:
            InvalidRequest: the template refuses these messages.
        """
        turns = messages if self.knows_tools else plain_turns(messages, tools)
        try:
            return self._template.render(
                messages=[dict(message) for message in turns],
                tools=[dict(tool) for tool in tools] if tools and self.knows_tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # a template is code from the checkpoint: it may raise anything
            raise InvalidRequest(f"the chat template refuses these messages: {error}", field="messages") from error
