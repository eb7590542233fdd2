"""Why requests went where they went: each decision with its candidates, and what came of it, for the last requests.

Life cycle of a decision: made with the predictions, told of the measured times as they come, dropped when enough
further requests have come.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from protocol.ids import Peer
from router.fleet import Floats

PREFILL_FIELDS = ("queue_tokens", "uncached_tokens", "ttft_s", "wait_s", "speed", "cost")
DECODE_FIELDS = ("running", "missing_tokens", "transfer_s", "tpot_s", "wait_s", "speed", "cost")


@dataclass(frozen=True, slots=True)
class Candidates:
    """Workers of one role that were looked at.

    Attributes:
        names: the cheapest first.
        fields: of ``table``, a row each.
        table: ``[len(fields), len(names)]``.
    """

    names: tuple[str, ...]
    fields: tuple[str, ...]
    table: Floats

    def told(self) -> list[dict[str, Any]]:
        """A mapping for each worker."""
        return [
            {"worker": name, **dict(zip(self.fields, np.round(column, 6).tolist(), strict=True))}
            for name, column in zip(self.names, self.table.T, strict=True)
        ]


@dataclass(slots=True)
class Decision:
    """One placement.

    Attributes:
        request_id, attempt: of which attempt.
        at: when (monotonic seconds).
        prefill, decode: the chosen incarnations.
        predicted_ttft, predicted_tpot, predicted_transfer: in seconds; no decode, no output after the first token.
        measured_ttft, measured_tpot: from ``at`` on; None until they are known.
    """

    request_id: str
    attempt: int
    policy: str
    at: float
    prompt_tokens: int
    cached_tokens: int
    prefill: Peer
    decode: Peer | None
    predicted_ttft: float
    predicted_tpot: float | None
    predicted_transfer: float | None
    prefill_candidates: Candidates
    decode_candidates: Candidates | None
    measured_ttft: float | None = None
    measured_tpot: float | None = None

    def told(self) -> dict[str, Any]:
        """Ready for JSON; holds no address."""
        decode = self.decode_candidates
        return {
            "request": self.request_id,
            "attempt": self.attempt,
            "policy": self.policy,
            "prompt_tokens": self.prompt_tokens,
            "prefill": self.prefill.name,
            "decode": None if self.decode is None else self.decode.name,
            "predicted": {
                "cached_tokens": self.cached_tokens,
                "ttft_s": _rounded(self.predicted_ttft),
                "tpot_s": _rounded(self.predicted_tpot),
                "transfer_s": _rounded(self.predicted_transfer),
            },
            "measured": {"ttft_s": _rounded(self.measured_ttft), "tpot_s": _rounded(self.measured_tpot)},
            "prefill_candidates": self.prefill_candidates.told(),
            "decode_candidates": [] if decode is None else decode.told(),
        }


class Explanations:
    """Decisions by the name that clients know their request by.

    Args:
        kept: requests at most.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._decisions: OrderedDict[str, list[Decision]] = OrderedDict()

    def keep(self, name: str, decision: Decision) -> None:
        """Note a decision of the request ``name``, of which there may be several."""
        if not self._kept:
            return
        self._decisions.setdefault(name, []).append(decision)
        if len(self._decisions) > self._kept:
            self._decisions.popitem(last=False)

    def find(self, name: str) -> list[Decision]:
        """All decisions of a request, in order; none when it is not known (any more)."""
        return self._decisions.get(name, [])


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
