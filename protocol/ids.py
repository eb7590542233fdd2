"""Names of things that two processes speak about."""

from __future__ import annotations

import secrets
from typing import Annotated, Literal

import msgspec

Role = Literal["prefill", "decode"]
"""What a worker does."""

RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
WorkerId = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+$")]
Incarnation = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Attempt = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Address = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Ticket = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class RequestKey(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One attempt of one request; every message about it carries this, and a late one changes nothing.

    Attributes:
        request_id: the router's own id, never the client's.
        attempt: 0 for the first try.
    """

    request_id: RequestId
    attempt: Attempt

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """One life of one process.

    Attributes:
        name: the worker's or router's configured name.
        incarnation: drawn anew, and larger, at each start.
    """

    name: WorkerId
    incarnation: Incarnation

    def __str__(self) -> str:
        return f"{self.name}@{self.incarnation:x}"


def new_request_id() -> str:
    """A fresh id of 128 random bits."""
    return secrets.token_hex(16)


def new_ticket() -> bytes:
    """A fresh, unguessable ticket of 128 bits, valid for one import."""
    return secrets.token_bytes(16)
