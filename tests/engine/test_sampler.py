"""The kept set is transformers' own, and draws follow the kept probabilities and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.logit_rules import Row, apply_rules
from engine.sampler import kept_weights, sample, uniforms
from protocol.errors import EngineFailure
from protocol.sampling import SamplingParams


def random_logits(rows: int, vocab: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def drawn(
    logits: torch.Tensor,
    sampling: Sequence[SamplingParams],
    positions: Sequence[int],
    histories: Sequence[Sequence[int]] | None = None,
) -> list[int]:
    told = histories or [()] * len(sampling)
    rows = [Row(*values) for values in zip(sampling, positions, told, strict=True)]
    return [draw.token_id for draw in sample(logits, rows)]


def shifted(logits: torch.Tensor) -> torch.Tensor:
    return logits - logits.max(-1, keepdim=True).values


@settings(max_examples=150, deadline=None)
@given(
    vocab=st.sampled_from([5, 300, 5000]),
    spread=st.sampled_from([0.0001, 1.0, 8.0]),
    temperature=st.floats(0.1, 3.0),
    top_k=st.sampled_from([0, 1, 2, 40, 2000, 10_000]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
    seed=st.integers(0, 1 << 20),
)
def test_kept_set_and_probabilities_are_those_of_transformers(
    vocab: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    # float64 on both sides: in float32 transformers' own running sum is off by more than a border is wide.
    logits = random_logits(1, vocab, seed, spread).double()
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p > 0.0:
        expected = MinPLogitsWarper(min_p)(None, expected)
    expected = torch.softmax(expected, -1)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    weights = kept_weights(shifted(logits), [params])
    assert torch.equal(weights > 0, expected > 0)
    torch.testing.assert_close(weights / weights.sum(), expected)


def test_ties_at_a_border_are_all_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 0.0, 1.0]])
    by_count = kept_weights(shifted(logits), [SamplingParams(top_k=2)])
    by_mass = kept_weights(shifted(logits), [SamplingParams(top_p=0.75)])
    for weights in (by_count, by_mass):
        assert (weights > 0).tolist() == [[True, True, True, False, True]]


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.5}, {"temperature": 1.7, "top_k": 5}, {"top_p": 0.6}, {"top_k": 6, "top_p": 0.8}],
)
def test_draws_follow_the_kept_probabilities(params: dict[str, float]) -> None:
    draws = 20_000
    logits = random_logits(1, 12, 4, 1.0)
    settings_of = [SamplingParams(**params, seed=99)] * draws
    tokens = drawn(logits.expand(draws, -1), settings_of, range(draws))
    weights = kept_weights(shifted(logits), settings_of[:1])[0]
    expected = (weights / weights.sum()).numpy()
    counts = np.bincount(tokens, minlength=12)
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    chi_square = float((((counts - draws * expected) ** 2)[kept] / (draws * expected[kept])).sum())
    freedom = int(kept.sum()) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom) + 5


def test_a_row_is_drawn_alike_whatever_the_batch() -> None:
    rng = np.random.default_rng(0)
    logits = random_logits(40, 3000, 8)
    params = [
        SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 1.3])),
            top_k=int(rng.choice([0, 3, 50])),
            top_p=float(rng.choice([1.0, 0.9, 0.3])),
            seed=int(rng.integers(1 << 62)),
            stop_token_ids=(1, 7),
            min_tokens=int(rng.choice([0, 10])),
            min_p=float(rng.choice([0.0, 0.02])),
            repetition_penalty=float(rng.choice([1.0, 1.3])),
            frequency_penalty=float(rng.choice([0.0, 0.6])),
            logit_bias=((5, 2.0), (9, -3.0)) if rng.integers(2) else (),
        )
        for _ in range(40)
    ]
    positions = rng.integers(0, 16, 40).tolist()
    histories = [rng.integers(0, 3000, 20).tolist() for _ in range(40)]
    together = drawn(logits, params, positions, histories)
    alone = [drawn(logits[[row]], [params[row]], [positions[row]], [histories[row]])[0] for row in range(40)]
    order = rng.permutation(40).tolist()
    shuffled = drawn(logits[order], *([values[row] for row in order] for values in (params, positions, histories)))
    assert together == alone
    assert [together[row] for row in order] == shuffled


def test_seed_and_position_both_change_the_draw() -> None:
    numbers = uniforms([1, 1, 2, 2, 0, (1 << 63) - 1], [0, 1, 0, 1, 0, 1 << 20])
    assert len(set(numbers.tolist())) == 6
    assert ((numbers >= 0) & (numbers < 1)).all()
    many = uniforms(list(range(100)) * 100, np.repeat(np.arange(100), 100).tolist())
    assert abs(many.mean() - 0.5) < 0.015
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(many[:-100], many[100:])[0, 1]) < 0.03


def test_the_draw_of_a_seed_is_fixed_for_good() -> None:
    # A failover continues a text that another release may have begun: these values may never change.
    assert uniforms([0, 1, 42], [0, 5, 7]).tolist() == [0.6524484863740322, 0.7743991716672016, 0.7347204584623639]


def test_greedy_takes_the_first_of_the_highest() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [9.0, 9.0, 9.0, 9.0]])
    assert drawn(logits, [SamplingParams(temperature=0.0)] * 2, [0, 0]) == [1, 0]
    assert drawn(logits.bfloat16(), [SamplingParams(temperature=0.0)] * 2, [0, 0]) == [1, 0]


def test_stop_tokens_are_not_drawn_before_min_tokens() -> None:
    logits = torch.tensor([[0.0, 50.0, 40.0, 1.0]])
    for temperature in (0.0, 1.0):
        settings_of = SamplingParams(temperature=temperature, stop_token_ids=(1, 2, 900), min_tokens=3)
        found = [drawn(logits, [settings_of], [position])[0] for position in range(5)]
        assert not {1, 2} & set(found[:3])
        assert found[3:] == [1, 1]


@pytest.mark.parametrize("temperature", [1e-320, 1e-40, 1e-6, 100.0])
def test_extreme_temperatures_still_draw(temperature: float) -> None:
    logits = torch.tensor([[3e4, -3e4, 2.9e4]])
    tokens = drawn(logits.expand(50, -1), [SamplingParams(temperature=temperature)] * 50, range(50))
    assert set(tokens) == {0}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    with pytest.raises(EngineFailure, match="not finite"):
        drawn(torch.tensor([[0.0, 1.0], [bad, 0.0]]), [SamplingParams()] * 2, [0, 0])
    # What is drawn of them is looked up before it is known that they are none.
    every = SamplingParams(logprobs=2, top_k=1, top_p=0.5, min_p=0.1)
    with pytest.raises(EngineFailure, match="not finite"):
        drawn(torch.tensor([[bad, bad]]), [every], [0])


def test_a_greedy_row_among_others_keeps_its_own() -> None:
    logits = random_logits(5, 40, 3)
    asked = [SamplingParams(temperature=temperature, seed=3, logprobs=1) for temperature in (0.0, 1.0, 0.0, 2.0, 0.0)]
    rows = [Row(each, position) for position, each in enumerate(asked)]
    together = sample(logits, rows)
    assert together == [sample(logits[index, None], rows[index : index + 1])[0] for index in range(5)]
    assert [together[index].token_id for index in (0, 2, 4)] == logits[[0, 2, 4]].argmax(-1).tolist()


@given(
    history=st.lists(st.integers(0, 19), min_size=1, max_size=30),
    penalty=st.floats(0.5, 3.0),
    seed=st.integers(0, 1 << 16),
)
def test_the_repetition_penalty_is_that_of_transformers(history: list[int], penalty: float, seed: int) -> None:
    logits = random_logits(1, 20, seed)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([history]), logits.clone())
    found = apply_rules(logits, [Row(SamplingParams(repetition_penalty=penalty), 0, history)])
    torch.testing.assert_close(found, expected)


@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    output=st.lists(st.integers(0, 9), max_size=20),
    presence=st.floats(-2.0, 2.0),
    frequency=st.floats(-2.0, 2.0),
)
def test_presence_and_frequency_count_the_output_alone(
    prompt: list[int], output: list[int], presence: float, frequency: float
) -> None:
    logits = random_logits(1, 10, len(prompt))
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    found = apply_rules(logits, [Row(params, len(output), prompt + output)])
    expected = [
        float(logits[0, token]) - presence * (token in output) - frequency * output.count(token) for token in range(10)
    ]
    torch.testing.assert_close(found, torch.tensor([expected]))


def test_biases_ban_and_force_tokens_and_leave_other_rows_alone() -> None:
    logits = random_logits(3, 50, 1)
    plain = SamplingParams(temperature=0.0)
    first, second = torch.topk(logits[0], 2).indices.tolist()
    banned = SamplingParams(temperature=0.0, logit_bias=((first, -100.0), (1 << 30, 100.0)))
    forced = SamplingParams(temperature=0.0, logit_bias=((7, 100.0),))
    kept = logits.clone()
    assert drawn(logits, [plain] * 3, [0] * 3)[0] == first
    assert drawn(logits, [banned, forced, plain], [0] * 3) == [second, 7, int(logits[2].argmax())]
    assert torch.equal(logits, kept)


def test_log_probabilities_are_the_models_own() -> None:
    logits = random_logits(3, 30, 5)
    expected = torch.log_softmax(logits, -1)
    rows = [
        Row(SamplingParams(temperature=0.0, logprobs=3, logit_bias=((4, 100.0),)), 0),
        Row(SamplingParams(temperature=0.3, top_k=2), 0),
        Row(SamplingParams(temperature=2.0, logprobs=0), 0),
    ]
    forced, plain, bare = sample(logits, rows)
    assert plain.logprobs is None
    assert forced.token_id == 4
    assert forced.logprobs is not None
    assert forced.logprobs.logprob == pytest.approx(float(expected[0, 4]))
    best = torch.topk(expected[0], 3)
    assert [token for token, _ in forced.logprobs.top] == best.indices.tolist()
    assert [value for _, value in forced.logprobs.top] == pytest.approx(best.values.tolist())
    assert bare.logprobs is not None
    assert bare.logprobs.top == ()
    assert bare.logprobs.logprob == pytest.approx(float(expected[2, bare.token_id]))
