"""Lines of a stream of server-sent events, of bounded length, out of the pieces that its bytes come in.

They end at line feeds alone. What httpx and ``str.splitlines`` take for a line's end is more, U+2028 and U+0085 too,
and these may stand in the JSON of an event as they are.
"""

from __future__ import annotations

from protocol.errors import MalformedFrame

MAX_LINE = 16 << 20
"""Bytes of one event at most."""


class Lines:
    """See the module."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._length = 0

    def push(self, data: bytes) -> list[str]:
        """The lines that are whole with ``data``, without their ends.

        Raises:
            MalformedFrame: one is longer than MAX_LINE.
        """
        first, *rest = data.split(b"\n")
        self._pieces.append(first)
        self._length += len(first)
        lines = []
        if rest:
            lines = [b"".join(self._pieces), *rest[:-1]]
            self._pieces, self._length = [rest[-1]], len(rest[-1])
        longest = max(self._length, *map(len, lines), 0)
        if longest > MAX_LINE:
            raise MalformedFrame(f"an event has {longest} bytes or more, over the bound of {MAX_LINE}")
        return [line.removesuffix(b"\r").decode(errors="replace") for line in lines]
