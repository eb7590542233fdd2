"""An error of the tree, as a message carries it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from protocol.errors import KVFerryError, error_from_code

MAX_TEXT = 2000
"""Longest text in a message that a person is to read, in characters."""

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error of the tree, on the wire."""

    code: Annotated[str, msgspec.Meta(max_length=64)]
    message: Text
    field: Annotated[str, msgspec.Meta(max_length=256)] | None = None

    @classmethod
    def of(cls, error: KVFerryError) -> ErrorInfo:
        """The wire form of ``error``; a long message is cut to its bound."""
        return cls(code=error.code, message=error.message[:MAX_TEXT], field=error.field)

    def to_error(self) -> KVFerryError:
        """The error this stands for."""
        return error_from_code(self.code, self.message, field=self.field)
