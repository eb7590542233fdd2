"""Token ids to text, one token at a time, never half a character.

Life cycle of a :class:`Detokenizer`: :meth:`~Detokenizer.push` for each token of one output, then
:meth:`~Detokenizer.flush` once. The pieces, put together, are the text of decoding the whole list at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_WINDOW = 64
"""Longest window; it grows only while an output makes no sense as text."""
MAX_PENDING = 3
"""Replacement characters that are still held back then: a UTF-8 character has at most four bytes."""
KEPT_WINDOW = 8
"""What is kept of a window that grew too long: more bytes than a character has."""


class Decoder(Protocol):
    """What a detokenizer needs of a tokenizer."""

    @property
    def context_free(self) -> bool:
        """Whether a token's bytes do not depend on its neighbours."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``."""

    def is_silent(self, token_id: int) -> bool:
        """Whether ``token_id`` never gives text."""


class Detokenizer:
    """Incremental decoding of one output.

    A short window of tokens is decoded again with each new one. Bytes that do not make a character yet decode to
    replacement characters at the window's end, and these are held back.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._sent = ""
        self._clean = 0

    def push(self, token_id: int) -> str:
        """The text that is certain once ``token_id`` is there; often one token's, sometimes none."""
        if self._decoder.is_silent(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode()
        stable = text.rstrip(REPLACEMENT)
        if len(self._window) > MAX_WINDOW:
            stable = text[: max(len(stable), len(text) - MAX_PENDING)]
        piece = stable[len(self._sent) :]
        if len(stable) >= len(self._sent):
            self._sent = stable
        if len(stable) == len(text):
            self._shrink()
        elif len(self._window) > MAX_WINDOW:
            self._cut(held=len(text) - len(stable))
        return piece

    def flush(self) -> str:
        """What was held back at the end of the output: bytes that never became a character."""
        piece = self._decode()[len(self._sent) :] if self._window else ""
        self._window.clear()
        self._sent = ""
        self._clean = 0
        return piece

    def _decode(self) -> str:
        text = self._decoder.decode(self._window)
        if text.startswith(self._sent):
            return text
        # A run of byte tokens decodes as a whole or not at all, so a later bad byte takes back characters that were
        # sent. They stay sent: the window starts anew behind them.
        del self._window[: self._clean]
        self._clean = 0
        self._sent = ""
        return self._decoder.decode(self._window)

    def _shrink(self) -> None:
        """Forget the tokens before the newest piece: it alone is context enough for the next."""
        if self._decoder.context_free:
            self._window.clear()
            self._sent = ""
            return
        context = self._window[self._clean :]
        sent = self._decoder.decode(context)
        if sent:
            self._window = context
            self._sent = sent
        self._clean = len(self._window)

    def _cut(self, *, held: int) -> None:
        """Bound the work of an endless run of bytes that make no character."""
        del self._window[:-KEPT_WINDOW]
        text = self._decoder.decode(self._window)
        self._sent = text[: len(text) - held]
        self._clean = 0
