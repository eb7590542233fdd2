"""Why requests went where they went: each decision with its candidates, and what came of it, for the last requests.

Life cycle of a decision: made with the predictions, told of the measured times as they come, dropped when enough
further requests have come.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from protocol.ids import Peer
from router.columns import Floats, Rows

PREFILL_FIELDS = ("queue_tokens", "uncached_tokens", "ttft_s", "wait_s", "speed", "cost")
DECODE_FIELDS = ("running", "missing_tokens", "transfer_s", "tpot_s", "wait_s", "speed", "cost")


class Candidates:
    """Workers of one role that were looked at.

    Args:
        names: of all workers, by row.
        rows: of those that were looked at.
        fields: names of the numbers; the last is the cost.
        numbers: of each of them, in the same order.
    """

    __slots__ = ("_fields", "_names", "_numbers", "_rows")

    def __init__(
        self,
        names: Sequence[str],
        rows: Sequence[int] | Rows,
        fields: Sequence[str],
        numbers: Sequence[Sequence[float]] | Floats,
    ) -> None:
        self._names = names
        self._rows = rows
        self._fields = fields
        self._numbers = numbers

    def told(self) -> list[dict[str, Any]]:
        """A mapping for each worker, the cheapest first."""
        workers = [
            {"worker": self._names[row], **dict(zip(self._fields, numbers, strict=True))}
            for row, numbers in zip(self._rows, np.round(np.asarray(self._numbers, float), 6).tolist(), strict=True)
        ]
        return sorted(workers, key=itemgetter(self._fields[-1]))


@dataclass(slots=True)
class Decision:
    """One placement.

    Attributes:
        request_id, attempt: of which attempt.
        at: when (monotonic seconds).
        local_prefill: why the decode worker prefills; "" where a prefill worker does.
        prefill, decode: the chosen incarnations.
        predicted_ttft, predicted_tpot, predicted_transfer: in seconds; no decode, no output after the first token; one
            worker alone, no transfer.
        taken_over: when decode's first token came.
        measured_ttft, measured_tpot: from ``at``, and from ``taken_over`` on; None until they are known.
        charged_tokens, charged_prompt, charged_sequences: what the fleet still reckons with at the two workers: tokens
            that are to be computed, of a prompt of so many, and sequences.
        admission: how it was let in, ready for JSON; None of further attempts.
    """

    request_id: str
    attempt: int
    policy: str
    at: float
    prompt_tokens: int
    cached_tokens: int
    local_prefill: str
    prefill: Peer
    decode: Peer | None
    predicted_ttft: float
    predicted_tpot: float | None
    predicted_transfer: float | None
    prefill_candidates: Candidates | None
    decode_candidates: Candidates | None
    taken_over: float | None = None
    measured_ttft: float | None = None
    measured_tpot: float | None = None
    charged_tokens: float = 0.0
    charged_prompt: int = 0
    charged_sequences: int = 0
    admission: dict[str, Any] | None = None

    def told(self) -> dict[str, Any]:
        """Ready for JSON; holds no address."""
        prefill, decode = self.prefill_candidates, self.decode_candidates
        return {
            "request": self.request_id,
            "attempt": self.attempt,
            "policy": self.policy,
            "prompt_tokens": self.prompt_tokens,
            "local_prefill": self.local_prefill,
            "prefill": self.prefill.name,
            "decode": None if self.decode is None else self.decode.name,
            "predicted": {
                "cached_tokens": self.cached_tokens,
                "ttft_s": _rounded(self.predicted_ttft),
                "tpot_s": _rounded(self.predicted_tpot),
                "transfer_s": _rounded(self.predicted_transfer),
            },
            "admission": self.admission,
            "measured": {"ttft_s": _rounded(self.measured_ttft), "tpot_s": _rounded(self.measured_tpot)},
            "prefill_candidates": [] if prefill is None else prefill.told(),
            "decode_candidates": [] if decode is None else decode.told(),
        }


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request was not let in.

    Attributes:
        request_id: which.
        prompt_tokens: of it.
        admission: why, ready for JSON.
    """

    request_id: str
    prompt_tokens: int
    admission: dict[str, Any]

    def told(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"request": self.request_id, "prompt_tokens": self.prompt_tokens, "admission": self.admission}


class Explanations:
    """Decisions by the name that clients know their request by.

    Args:
        kept: requests at most.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._decisions: OrderedDict[str, list[Decision | Refusal]] = OrderedDict()

    def keep(self, name: str, decision: Decision | Refusal) -> None:
        """Note a decision of the request ``name``, of which there may be several."""
        if not self._kept:
            return
        self._decisions.setdefault(name, []).append(decision)
        if len(self._decisions) > self._kept:
            self._decisions.popitem(last=False)

    def find(self, name: str) -> list[Decision | Refusal]:
        """All decisions of a request, in order; none when it is not known (any more)."""
        return self._decisions.get(name, [])


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
