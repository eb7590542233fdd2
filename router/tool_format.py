"""How models write calls of tools, and which way a chat template asks for."""

from __future__ import annotations

from typing import Literal, get_args

KnownFormat = Literal["hermes", "llama3_json"]
ToolFormat = Literal["auto", "hermes", "llama3_json"]
"""``hermes``: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, or a list of such objects (Hermes, Qwen,
SmolLM2); ``llama3_json``: the whole answer is one ``{"name": ..., "parameters": {...}}``; ``auto``: as the
template says."""

TOOL_FORMATS: tuple[ToolFormat, ...] = get_args(ToolFormat)

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


def format_of(template: str) -> KnownFormat | None:
    """The way that a template with tools, by its text, asks the model to write calls; None for an unknown one."""
    if CALL_START in template:
        return "hermes"
    return "llama3_json" if PYTHON_TAG in template or '"parameters":' in template else None
