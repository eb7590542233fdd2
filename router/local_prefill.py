"""Whether an attempt's prompt is computed by the decode worker itself: a pure function of a snapshot.

A prompt that stays on one worker takes no lease and no transfer, and its steps then hold up the sequences that decode
there. :func:`decide` is the one place where it is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from protocol.errors import NoWorkerAvailable
from router.columns import Rows
from router.fleet import Fleet
from router.forecast import HORIZON, crossing, forecast_local
from router.policy import Choice, Demand, Ranking, Snapshot, penalties, place, place_alone

LocalPrefill = Literal["never", "fallback", "short", "auto", "always"]
"""``never``; ``fallback`` where there is no prefill worker; ``short`` then and for short prompts; ``auto`` then and
where that is predicted to be faster; or ``always``."""
LOCAL_PREFILLS: tuple[str, ...] = get_args(LocalPrefill)

Reason = Literal["", "no_prefill_worker", "short_prompt", "faster", "always"]
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

    def quiet(self, tokens: int) -> bool:
        """Whether a prompt of so many tokens goes to a prefill worker as long as there is one."""
        return self.mode in ("never", "fallback") or (self.mode == "short" and tokens > self.tokens)


def decide(policy: str, snapshot: Snapshot, demand: Demand, rule: LocalPrefillRule) -> Choice:
    """Where an attempt runs, and why if that is one worker.

    Raises:
        NoWorkerAvailable: nowhere; says which role is missing.
    """
    local = _local(policy, snapshot, demand, _wish(demand, rule))
    if local is not None:
        return local
    try:
        apart = place(policy, snapshot, demand)
        return _faster(snapshot, demand, apart) if rule.mode == "auto" else apart
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


def _faster(snapshot: Snapshot, demand: Demand, apart: Choice) -> Choice:
    """``apart``, or the decode worker on which prompt and output together are predicted to be through sooner.

    What either way takes from others counts too: sequences beside a prompt wait for it, and who comes next for a link.
    """
    fleet, told = snapshot.fleet, snapshot.forecast
    rows = fleet.able("decode")
    rows = rows[fleet.prefills[rows]]
    if not rows.size:
        return apart
    here = forecast_local(fleet, told)
    output = told.tpot * (min(demand.output, HORIZON) if demand.needs_decode else 0)
    alone = here.ttft + here.beside + output + told.wait
    avoided = penalties(fleet, demand)
    if avoided is not None:
        alone = alone + avoided
    first, second = apart.prefill, apart.decode
    there = told.ttft[first] + told.wait[first]
    if second is not None:
        blocks = crossing(fleet, told, first, second)
        there += blocks.late + blocks.ahead + blocks.alone + output[second] + told.wait[second]
    if avoided is not None:
        there += avoided[first] + (0.0 if second is None else avoided[second])
    chosen = int(rows[alone[rows].argmin()])
    if alone[chosen] >= there:
        return apart
    return Choice(chosen, chosen if demand.needs_decode else None, rows, rows, Ranking(alone, alone), "faster")
