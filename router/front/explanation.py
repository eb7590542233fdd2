"""What a client's request is told of where it went, as a header of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from router.front.exchange import Header

HEADER = b"x-kvferry-explain"
MOST = 8
"""Decisions that a header tells of: a request of many prompts has one for each."""


def explained(decisions: Sequence[dict[str, Any]]) -> tuple[Header, ...]:
    """The header: each decision without its candidates, which ``/explain/`` has."""
    short = [
        {field: value for field, value in decision.items() if not field.endswith("_candidates")}
        for decision in decisions[:MOST]
    ]
    return ((HEADER, msgspec.json.encode(short)),) if short else ()
