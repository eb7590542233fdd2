from __future__ import annotations

from pathlib import Path

import pytest

from engine.batch import Chunk
from engine.config import EngineConfig
from engine.step_pace import FIRST, StepPace
from engine.stepper import Stepper


def paced(*steps: tuple[int, float]) -> StepPace:
    pace = StepPace()
    for tokens, seconds in steps:
        pace.add(tokens, seconds)
    return pace


def test_a_line_is_found_through_steps_of_several_sizes() -> None:
    pace = paced(*((tokens, 0.02 + 0.0003 * tokens) for tokens in (8, 512, 64, 200, 512, 8) * 5))
    assert (pace.fixed, pace.per_token) == (pytest.approx(0.02), pytest.approx(0.0003))


def test_the_line_goes_through_the_mean() -> None:
    pace = paced(*((tokens, 0.001 * tokens * tokens) for tokens in (4, 6, 10, 8) * 60))
    assert pace.mean_tokens == pytest.approx(7.0, rel=0.05)
    assert paced().mean_tokens == 0.0
    alike = paced(*[(4, 0.2)] * 9)
    assert alike.fixed + alike.per_token * alike.mean_tokens == pytest.approx(0.2)


def test_what_is_alike_is_halved_and_nothing_is_negative() -> None:
    assert (paced().fixed, paced().per_token) == (0.0, 0.0)
    alike = paced(*[(4, 0.2)] * 9)
    assert (alike.fixed, alike.per_token) == (pytest.approx(0.1), pytest.approx(0.025))
    falling = paced(*[(10, 1.0), (20, 0.5), (30, 0.1)] * 4)
    assert falling.per_token == 0.0
    assert falling.fixed == pytest.approx(0.5, rel=0.1)
    through_nothing = paced(*[(10, 0.1), (100, 9.0)] * 4)
    assert through_nothing.fixed == 0.0


def test_old_steps_are_forgotten() -> None:
    pace = paced(*[(10, 1.0), (20, 2.0)] * 50, *[(10, 0.1), (20, 0.2)] * 300)
    assert pace.per_token == pytest.approx(0.01, rel=0.01)


def test_a_step_that_stood_still_is_not_the_pace() -> None:
    """Who is taken for slow gets no work, and so could never show that it is not."""
    assert paced((4, 0.01), (4, 60.0)).fixed == 0.0
    usual = paced(*[(4, 0.01)] * 9)
    began = paced((4, 60.0), *[(4, 0.01)] * 8)
    assert (began.fixed, began.per_token) == (pytest.approx(usual.fixed), pytest.approx(usual.per_token))
    stood = paced(*[(4, 0.01)] * 9, (4, 60.0))
    assert stood.fixed < 3 * usual.fixed
    slower = paced(*[(4, 0.01)] * 9, *[(4, 60.0)] * 100)
    assert slower.fixed == pytest.approx(30.0, rel=0.2)


@pytest.mark.parametrize(("decodes", "mean"), [(True, 2.0), (False, 6.0)])
async def test_the_pace_of_who_decodes_is_that_of_steps_without_a_prompt(
    tiny_llama_dir: Path, decodes: bool, mean: float
) -> None:
    """A prompt's token takes a hundredth of what a sequence does: with both on one line sequences looked as cheap."""
    config = EngineConfig(model=str(tiny_llama_dir), dtype="float32", num_blocks=16, block_size=4)
    stepper = await Stepper.load(config, decodes=decodes)
    sequences = [Chunk([7], 3, [1]), Chunk([9], 6, [2, 3])]
    for _ in range(FIRST):
        await stepper.execute(sequences)
        await stepper.execute([*sequences, Chunk(list(range(10, 18)), 0, [4, 5])])
    assert stepper.steps == 2 * FIRST
    assert stepper.pace.mean_tokens == pytest.approx(mean, rel=0.1)
    stepper.close()
