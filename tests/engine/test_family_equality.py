"""Every family, at every position, in every order of work: transformers' logits."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE, tiny_model
from family_cases import case, cases, grid
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model_equality import Served, random_pieces, reference_logits

from engine.batch import Chunk, flatten

BOUND = 1e-4
GRID = grid()


def every_logit(served: Served, chunks: list[Chunk]) -> list[torch.Tensor]:
    """The logits after each token of a step, for each of its chunks: what the runner computes and takes the last of."""
    runner = served.runner
    batch = flatten(chunks, runner._limits)
    with torch.inference_mode():
        hidden = runner._model.hidden(
            torch.from_numpy(batch.token_ids),
            torch.from_numpy(batch.positions),
            runner._backend.plan(batch),
            runner.cache,
        )
        return list(runner._model.logits(hidden).float().split([len(chunk.token_ids) for chunk in chunks]))


def served_logits(served: Served, sequences: list[list[int]], rng: random.Random) -> list[torch.Tensor]:
    """Of each sequence the logits after each token, computed in random pieces and batches."""
    pending = {index: random_pieces(sequence, rng) for index, sequence in enumerate(sequences)}
    found: dict[int, list[torch.Tensor]] = {index: [] for index in pending}
    while pending:
        chosen = rng.sample(sorted(pending), rng.randint(1, len(pending)))
        logits = every_logit(served, [served.chunk(index, pending[index].pop(0)) for index in chosen])
        for index, rows in zip(chosen, logits, strict=True):
            found[index].append(rows)
        pending = {index: pieces for index, pieces in pending.items() if pieces}
    return [torch.cat(rows) for rows in found.values()]


def worst_at_any_position(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of a position's logits, relative to the largest of them."""
    assert torch.isfinite(found).all()
    return float(((found - expected).abs().amax(-1) / expected.abs().amax(-1)).max())


def compare(path: Path, rng: random.Random, **engine: Any) -> None:
    block_size = engine["block_size"]
    served = Served(path, rng, num_blocks=1 + 3 * -(-128 // block_size), **engine)
    # Not token 0: Gemma takes it for padding, and transformers' embedding of that is zero, as are logits of it alone.
    sequences = [[rng.randrange(VOCAB_SIZE) or 1 for _ in range(length)] for length in (1, 41, rng.randint(70, 128))]
    for found, expected in zip(served_logits(served, sequences, rng), reference_logits(path, sequences), strict=True):
        assert worst_at_any_position(found, expected) < BOUND
        # No two logits are so near each other that rounding may change the order: the greedy token is the same.
        best = expected.topk(2).values
        clear = (best[:, 0] - best[:, 1]) > 2 * BOUND * expected.abs().amax(-1)
        assert (found.argmax(-1) == expected.argmax(-1))[clear].all()
        assert clear.float().mean() > 0.9


@pytest.mark.parametrize("name", GRID)
def test_logits_at_every_position(name: str, tmp_path: Path) -> None:
    rng = random.Random(name)
    tiny_model(tmp_path, seed=len(name), **GRID[name])
    order, block_size = rng.choice(("NHD", "HND")), rng.choice((1, 4, 8, 12, 16))
    compare(tmp_path, rng, order=order, block_size=block_size)


@pytest.mark.timeout(3600)
def test_logits_at_every_position_of_models_drawn_at_random(equality_examples: int) -> None:
    engines = st.fixed_dictionaries(
        {
            "order": st.sampled_from(("NHD", "HND")),
            "block_size": st.sampled_from((1, 3, 4, 16)),
            "attention": st.sampled_from(("native", "sdpa", "reference")),
        }
    )

    @settings(max_examples=equality_examples, deadline=None)
    @given(cases(), engines, st.integers(0, 1 << 16))
    def explore(model: dict[str, Any], engine: dict[str, Any], seed: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = tiny_model(Path(folder), seed=seed, **model)
            compare(path, random.Random(seed), **engine)

    explore()


@pytest.mark.parametrize(("family", "choice"), [("llama", 3), ("qwen3", 5), ("phi3", 2)])
def test_logits_far_out(family: str, choice: int, tmp_path: Path) -> None:
    """What rope's angles are off by grows with the position."""
    rng = random.Random(family)
    far = case(family, (4, 2), 64, choice) | {"max_position_embeddings": 4096}
    if family == "phi3":
        far["original_max_position_embeddings"] = 4096
    tiny_model(tmp_path, **far)
    sequence = [rng.randrange(VOCAB_SIZE) for _ in range(2500)]
    served = Served(tmp_path, rng, num_blocks=160)
    pieces = [sequence[start : start + 500] for start in range(0, 2500, 500)]
    found = torch.cat([every_logit(served, [served.chunk(0, piece)])[0] for piece in pieces])
    assert worst_at_any_position(found, reference_logits(tmp_path, [sequence])[0]) < BOUND


@pytest.mark.parametrize("name", [name for number, name in enumerate(GRID) if number % 5 == number // 5 % 5])
def test_bfloat16_is_within_its_rounding_of_the_exact_logits(name: str, tmp_path: Path) -> None:
    """Teacher-forced: each family's error is that of transformers in bfloat16, or less, over the whole text."""
    rng = random.Random(name)
    tiny_model(tmp_path, seed=1, dtype="bfloat16", **GRID[name])
    sequence = [rng.randrange(VOCAB_SIZE) for _ in range(100)]
    (exact,) = reference_logits(tmp_path, [sequence])
    (theirs,) = reference_logits(tmp_path, [sequence], torch.bfloat16)
    served = Served(tmp_path, rng, dtype="bfloat16", num_blocks=16, block_size=8)
    (found,) = served_logits(served, [sequence], rng)

    def error(logits: torch.Tensor) -> torch.Tensor:
        return (logits - exact).pow(2).mean(-1).sqrt() / exact.std(-1)

    # Both round at the same places, and sum up in another order.
    if "mixtral" in name:
        # Which of two experts a near-tie takes is a matter of rounding; it puts a position far off, and those that see
        # it a little.
        assert error(found).median() < 1.3 * error(theirs).median() < 0.3
        assert error(found).quantile(0.9) < 2 * error(theirs).quantile(0.9)
    else:
        assert error(found).mean() < 1.3 * error(theirs).mean() < 0.3
        assert error(found).max() < 2 * error(theirs).max()
