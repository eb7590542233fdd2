"""The states of one request, and what moves it from one to the next."""

from __future__ import annotations

from enum import Enum

from protocol.transitions import TransitionTable


class RequestState(Enum):
    """Where a request is."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDOFF = "handoff"
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


class RequestEvent(Enum):
    """What moves a request."""

    PLACED = "placed"
    PREFILLED = "prefilled"
    DECODED = "decoded"
    COMPLETED = "completed"
    RETRIED = "retried"
    CANCELLED = "cancelled"
    FAILED = "failed"


_LIVE = (RequestState.QUEUED, RequestState.PREFILLING, RequestState.HANDOFF, RequestState.DECODING)
_ATTEMPTING = _LIVE[1:]

REQUEST_TABLE = TransitionTable(
    "request",
    RequestState.QUEUED,
    {
        (RequestState.QUEUED, RequestEvent.PLACED): RequestState.PREFILLING,
        (RequestState.PREFILLING, RequestEvent.PREFILLED): RequestState.HANDOFF,
        (RequestState.HANDOFF, RequestEvent.DECODED): RequestState.DECODING,
        (RequestState.DECODING, RequestEvent.DECODED): RequestState.DECODING,
        # Between two attempts too: its reader may find that what came so far is all that is wanted.
        **{(state, RequestEvent.COMPLETED): RequestState.FINISHED for state in _LIVE},
        **{(state, RequestEvent.RETRIED): RequestState.QUEUED for state in _ATTEMPTING},
        **{(state, RequestEvent.CANCELLED): RequestState.CANCELLED for state in _LIVE},
        **{(state, RequestEvent.FAILED): RequestState.FAILED for state in _LIVE},
    },
)
"""A request's machine; FINISHED, CANCELLED and FAILED are its ends."""
