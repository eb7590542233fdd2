"""Finds stop strings in a text that arrives in pieces.

Life cycle of a :class:`StopMatcher`: :meth:`~StopMatcher.push` for each piece until it reports a match, or
:meth:`~StopMatcher.flush` once at the end.
"""

from __future__ import annotations


class StopMatcher:
    """Passes text on, up to the first stop string.

    The first is the one that is complete first, and of two that end together the longer one: a rule that does not
    depend on how the text was cut into pieces. Text that may be the beginning of a stop string is held back.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """``(text to pass on, whether a stop string was completed)``."""
        if not self._stops or not piece:
            return piece, False
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        cut = len(text) - self._open_end(text)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """What was held back when the output ended."""
        held, self._held = self._held, ""
        return held

    def _open_end(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = max(map(len, self._stops)) - 1
        for size in range(min(longest, len(text)), 0, -1):
            end = text[-size:]
            if any(len(stop) > size and stop.startswith(end) for stop in self._stops):
                return size
        return 0
