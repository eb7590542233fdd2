"""Finds the end of a JSON object or array in a text that arrives in pieces."""

from __future__ import annotations

import re

_STEP = re.compile(r'\\(?:.|$)|["{}\[\]]', re.DOTALL)
"""What the end of a value depends on: brackets, outside strings."""


class JsonScanner:
    """Reads one value, from its first bracket on, until :meth:`push` says where it ends.

    Args:
        depth: brackets that are open already.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def push(self, piece: str) -> int | None:
        """How much of ``piece`` belongs to the value; None for all of it, and more to come."""
        start = 1 if self._escaped and piece else 0
        self._escaped = self._escaped and not piece
        for step in _STEP.finditer(piece, start):
            mark = step[0]
            if mark[0] == "\\":
                self._escaped = len(mark) == 1
            elif mark == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if mark in "{[" else -1
                if not self._depth:
                    return step.end()
        return None
