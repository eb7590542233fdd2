"""A step tells how far it is: at which layers, from which thread, and that what it has told of stays as it is."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_llama

from engine.batch import Chunk
from engine.config import EngineConfig
from engine.layer_watch import LayerWatch
from engine.models.decoder import Decoder
from engine.runner import ModelRunner
from engine.stepper import Stepper
from protocol.errors import EngineFailure, InvariantViolation
from protocol.sampling import SamplingParams

LAYERS = 5
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def deep_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("deep"), num_hidden_layers=LAYERS)


def settings(model: Path, **changes: object) -> EngineConfig:
    given = {"model": str(model), "dtype": "float32", "num_blocks": 16, "block_size": 4, **changes}
    return EngineConfig(**given)  # type: ignore[arg-type]


def chunks() -> list[Chunk]:
    """Two prompts' pieces in one step: one from its beginning, one after two blocks that are there already."""
    return [Chunk(list(range(7, 18)), 0, [3, 9, 4], GREEDY), Chunk([40, 41, 42], 8, [5, 6, 12])]


@pytest.mark.parametrize(("every", "told"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (3, [3, 5]), (5, [5]), (9, [5])])
def test_each_border_is_told_once_and_the_last_layer_always(deep_llama_dir: Path, every: int, told: list[int]) -> None:
    runner, heard = ModelRunner.load(settings(deep_llama_dir)), list[int]()
    watched = runner.execute(chunks(), LayerWatch(every, heard.append))
    assert heard == told
    assert watched == runner.execute(chunks())


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_what_was_told_of_is_never_written_again(deep_llama_dir: Path, order: str) -> None:
    """The argument for shipping a layer range while later layers compute: its bytes are final, block by block."""
    runner = ModelRunner.load(settings(deep_llama_dir, order=order))
    pool, seen = runner.cache.tensor, dict[int, torch.Tensor]()
    pool.fill_(-7.0)
    runner.execute(chunks(), LayerWatch(1, lambda done: seen.update({done: pool.clone()})))
    blocks = [3, 9, 4, 12]
    for done, at_border in seen.items():
        assert torch.equal(at_border[:, :done], pool[:, :done]), f"layers before {done} changed later"
        assert bool((at_border[blocks, :done].flatten(3) != -7.0).any(-1).all()), f"layers before {done} were not there"
        assert bool((at_border[:, done:] == -7.0).all()), f"layers from {done} on were written early"


async def test_the_loop_hears_it_in_order_and_before_the_step_is_over(deep_llama_dir: Path) -> None:
    stepper, heard, here = await Stepper.load(settings(deep_llama_dir)), list[int](), threading.get_ident()

    def tell(done: int) -> None:
        assert threading.get_ident() == here
        heard.append(done)

    try:
        tokens = await stepper.execute(chunks(), LayerWatch(2, tell))
        assert heard == [2, 4, 5]
        assert tokens == await stepper.execute(chunks())
    finally:
        stepper.close()


async def test_a_step_that_fails_in_its_middle_has_told_what_it_had_done(deep_llama_dir: Path) -> None:
    stepper, heard = await Stepper.load(settings(deep_llama_dir)), list[int]()
    model = stepper.runner._model
    assert isinstance(model, Decoder)

    def fails(*_: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    model._layers = (*model._layers[:3], fails, *model._layers[4:])  # type: ignore[assignment]
    try:
        with pytest.raises(EngineFailure, match="out of memory"):
            await stepper.execute(chunks(), LayerWatch(1, heard.append))
        assert heard == [1, 2, 3]
    finally:
        stepper.close()


def test_a_watch_needs_a_stride() -> None:
    with pytest.raises(InvariantViolation, match="got 0"):
        LayerWatch(0, print)
