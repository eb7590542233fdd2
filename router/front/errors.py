"""Errors as HTTP answers: one table from the error tree to status and OpenAI's error type."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from protocol.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KVFerryError,
    NoWorkerAvailable,
    Overloaded,
    PayloadTooLarge,
    Unauthorized,
    UnknownModel,
    UnknownRequest,
    UnsupportedMediaType,
)

STATUSES: dict[type[KVFerryError], int] = {
    KVFerryError: 500,
    InvalidRequest: 400,
    Unauthorized: 401,
    UnknownModel: 404,
    UnknownRequest: 404,
    PayloadTooLarge: 413,
    UnsupportedMediaType: 415,
    Overloaded: 429,
    NoWorkerAvailable: 503,
    DeadlineExceeded: 504,
}
"""HTTP status by class; a class that is not here takes its nearest ancestor's."""

RETRY_AFTER: dict[int, int] = {503: 2}
"""Seconds that a client is asked to wait, by status; those of a 429 are the error's own."""

_ADDRESS = re.compile(r"[a-z][a-z0-9+_.-]*://[^\s'\",;)]+|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b", re.IGNORECASE)


def status_of(error: KVFerryError) -> int:
    """The HTTP status that answers ``error``."""
    return next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)


def retry_after(error: KVFerryError) -> int | None:
    """Whole seconds that a client is asked to wait before it tries again; None where it is not."""
    if isinstance(error, Overloaded):
        return max(1, math.ceil(error.retry_after))
    return RETRY_AFTER.get(status_of(error))


def error_type(status: int) -> str:
    """OpenAI's error type for an HTTP status."""
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def error_object(message: str, status: int, code: str | None, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": error_type(status), "param": param, "code": code}}


def without_addresses(text: str) -> str:
    """``text`` without the addresses in it, for whoever has no business to know them."""
    return _ADDRESS.sub("[address]", text)


def error_body(error: KVFerryError) -> bytes:
    """The JSON for ``error``; what went wrong inside is told without addresses."""
    status = status_of(error)
    message = error.message if status < 500 else without_addresses(error.message)
    return msgspec.json.encode(error_object(message, status, error.code, error.field))
