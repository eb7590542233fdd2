"""What is held against a whole role: its steps, for as long as they are slow, and no wait for blocks."""

from __future__ import annotations

import pytest
from worker_facts import MODEL, heartbeat

from protocol.ids import Peer, RequestKey
from router.explanations import Decision
from router.placer import Placer, PlacerConfig
from router.policy import Demand
from router.prompt_chain import PromptChains
from router.registry import WorkerRegistry
from router.role_correction import FADE, LARGEST, RoleCorrection

STEP = {"steps": 10_000, "step_per_token": 1e-2}
P0, D0 = Peer("p0", 1), Peer("d0", 1)


def serving() -> Placer:
    registry = WorkerRegistry(10.0, 10.0, 60.0)
    placer = Placer(PlacerConfig(MODEL, "cost"), registry)
    for peer, beat in ((P0, heartbeat("prefill", **STEP)), (D0, heartbeat("decode", **STEP))):
        registry.heartbeat(peer, b"", beat, 0.0)
        placer.heartbeat(peer, 0, 0.0)
    return placer


def served(placer: Placer, number: int, now: float, *, wait: float, step: float = 1e-2, tokens: int = 10) -> Decision:
    """A request whose blocks come so long after its first token, and that gets a token every step from then on."""
    chains = PromptChains((1, 2, 3, 4), "")
    _, decision = placer.place(chains, Demand(True, output=tokens), RequestKey(f"r{number}", 0), now)
    first = now + decision.predicted_ttft
    placer.first_token(decision, first)
    placer.taken_over(decision, 0, 0.0, first + wait + step)
    placer.ended(decision, tokens, first + wait + step * (tokens - 1))
    placer.release(decision, first + wait + step * (tokens - 1), computed=True)
    return decision


def test_waits_for_blocks_say_nothing_of_a_decode_workers_steps() -> None:
    placer = serving()
    found = [served(placer, number, float(number), wait=1.0) for number in range(100)]
    assert found[-1].measured_tpot == pytest.approx(1e-2)
    assert found[-1].predicted_tpot == pytest.approx(found[0].predicted_tpot, rel=0.01)


def test_slow_steps_are_believed_and_forgotten_when_none_are_seen_any_more() -> None:
    placer = serving()
    usual = served(placer, 0, 0.0, wait=0.0).predicted_tpot
    assert usual is not None
    for number in range(1, 100):
        slow = served(placer, number, 0.1 * number, wait=0.0, step=5e-2).predicted_tpot
    assert slow is not None
    assert slow == pytest.approx(5 * usual, rel=0.25)
    later = served(placer, 100, 10.0 + 5 * FADE, wait=0.0).predicted_tpot
    assert later == pytest.approx(usual, rel=0.05)


def test_it_moves_by_what_is_measured_within_bounds_and_back() -> None:
    correction = RoleCorrection()
    assert correction.at(1e6) == 1.0
    for _ in range(200):
        correction.correct(3.0, 5.0)
    assert correction.at(5.0) == pytest.approx(LARGEST)
    assert [round(correction.at(5.0 + FADE * times), 2) for times in (1, 2, 10)] == [2.15, 1.33, 1.0]
    for _ in range(400):
        correction.correct(0.1, 5.0)
    assert correction.at(5.0) == pytest.approx(1.0 / LARGEST)
    assert correction.at(4.0) == pytest.approx(1.0 / LARGEST), "clocks of the caller's never make it more"
