"""Whether an attempt's prompt is computed by the decode worker itself: a pure function of a snapshot.

A prompt that stays on one worker takes no lease and no transfer, and its steps then hold up the sequences that decode
there. :func:`decide` is the one place where it is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from protocol.errors import NoWorkerAvailable
from router.fleet import Fleet, Rows
from router.policy import Choice, Demand, Snapshot, place, place_alone

LocalPrefill = Literal["never", "fallback", "short", "always"]
"""``never``; ``fallback`` where there is no prefill worker; ``short`` then and for short prompts; or ``always``."""
LOCAL_PREFILLS: tuple[str, ...] = get_args(LocalPrefill)

Reason = Literal["", "no_prefill_worker", "short_prompt", "always"]
"""Why a prompt stays on the decode worker; "" where it does not."""


@dataclass(frozen=True, slots=True)
class LocalPrefillRule:
    """When prompts stay on the decode worker.

    Attributes:
        mode: see :data:`LocalPrefill`.
        tokens: a prompt of at most so many is short.
    """

    mode: LocalPrefill = "fallback"
    tokens: int = 0


def decide(policy: str, snapshot: Snapshot, demand: Demand, rule: LocalPrefillRule) -> Choice:
    """Where an attempt runs, and why if that is one worker.

    Raises:
        NoWorkerAvailable: nowhere; says which role is missing.
    """
    local = _local(policy, snapshot, demand, _wish(demand, rule))
    if local is not None:
        return local
    try:
        return place(policy, snapshot, demand)
    except NoWorkerAvailable:
        without = rule.mode != "never" and not snapshot.fleet.able("prefill").size
        local = _local(policy, snapshot, demand, "no_prefill_worker" if without else "")
        if local is None:
            raise
        return local


def prompt_rows(fleet: Fleet, rule: LocalPrefillRule) -> Rows:
    """Rows of the workers that compute prompts, short ones that stay on decode workers left out."""
    rows = fleet.able("prefill")
    if rule.mode == "never" or (rule.mode != "always" and rows.size):
        return rows
    decode = fleet.able("decode")
    local = decode[fleet.prefills[decode]]
    return local if local.size else rows


def _wish(demand: Demand, rule: LocalPrefillRule) -> Reason:
    if rule.mode == "always":
        return "always"
    return "short_prompt" if rule.mode == "short" and demand.prompt_tokens <= rule.tokens else ""


def _local(policy: str, snapshot: Snapshot, demand: Demand, reason: Reason) -> Choice | None:
    """On the decode worker that the policy likes best of those that compute prompts; None without one, or a reason."""
    rows = snapshot.fleet.able("decode")
    rows = rows[snapshot.fleet.prefills[rows]]
    return place_alone(policy, snapshot, demand, rows, reason) if reason and rows.size else None
