"""Steps of decodes on a tape: the kernels' calls and torch's are made again, in their order, on memory that stays."""

from __future__ import annotations

import gc
import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_model

from engine.batch import Chunk
from engine.config import EngineConfig
from engine.native.library import load
from engine.runner import ModelRunner
from engine.tape_recorder import Scratch, TapeRecorder
from protocol.sampling import SamplingParams

KERNELS = load()
GREEDY = SamplingParams(temperature=0.0)
pytestmark = pytest.mark.skipif(
    KERNELS is None or not KERNELS.linear_kind, reason="no compiler, or no dot products of bfloat16"
)

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},  # norms of its heads are torch's
    "phi3": {"partial_rotary_factor": 0.5, "num_attention_heads": 2, "num_key_value_heads": 2},  # and its rotation
    "gemma2": {"head_dim": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "sliding_window": 9},
}


def runner_of(path: Path, mode: str, **settings: object) -> ModelRunner:
    given = {"dtype": "bfloat16", "num_blocks": 60, "block_size": 8, "max_sequences": 7, "threads": 1, **settings}
    runner = ModelRunner.load(EngineConfig(model=str(path), cuda_graphs=mode, **given))  # type: ignore[arg-type]
    runner.warm_up()
    return runner


def grown(runner: ModelRunner, seed: int) -> list[torch.Tensor]:
    """Logits of steps of decodes of batches that shrink and grow, with prompts in between."""
    rng, found = random.Random(seed), []
    tables = [[1 + 8 * row + at for at in range(8)] for row in range(7)]
    lengths = [0] * 7
    for rows in (7, 3, 1, 5, 2, 7, 4):
        if rows == 7:
            for row, table in enumerate(tables):
                lengths[row] = rng.randint(1, 20)
                runner.execute([Chunk([rng.randrange(5, 250) for _ in range(lengths[row])], 0, table, GREEDY)])
        chunks = [Chunk([rng.randrange(5, 250)], lengths[row], tables[row], GREEDY) for row in range(rows)]
        for row in range(rows):
            lengths[row] += 1
        found.append(runner.logits(chunks).clone())
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", ["auto", "float8_e4m3"])
def test_a_replay_gives_the_very_logits_of_the_step_that_python_drives(tmp_path: Path, family: str, cache: str) -> None:
    model = tiny_model(tmp_path / family, family=family, **FAMILIES[family])
    plain, taped = (
        runner_of(model, mode, kv_cache_dtype=cache, cuda_graph_batches=(1, 2, 4, 7)) for mode in ("off", "auto")
    )
    assert plain._graphs is None
    assert taped._graphs is not None
    assert taped._graphs.captured == (1, 2, 4, 7)
    assert not taped.cache.tensor.view(torch.uint8)[1:].any(), "recording wrote a block"
    for one, other in zip(grown(plain, 3), grown(taped, 3), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(plain.cache.tensor.view(torch.uint8)[1:], taped.cache.tensor.view(torch.uint8)[1:])


def test_a_model_that_looks_at_values_and_one_in_float32_are_left_to_python(tmp_path: Path) -> None:
    mixtral = tiny_model(tmp_path / "mixtral", family="mixtral", num_local_experts=4)
    graphs = runner_of(mixtral, "auto")._graphs
    assert graphs is not None
    assert graphs.captured == ()
    assert runner_of(tiny_model(tmp_path / "llama"), "auto", dtype="float32")._graphs is None


def test_a_model_that_replays_goes_with_its_last_reference(tmp_path: Path) -> None:
    assert KERNELS is not None
    runner = ModelRunner.load(EngineConfig(model=str(tiny_model(tmp_path)), dtype="bfloat16", num_blocks=8, threads=1))
    assert runner.capture_decodes(TapeRecorder(KERNELS))
    pool, graphs = weakref.ref(runner.cache), weakref.ref(runner._graphs)
    gc.disable()
    try:
        del runner
        assert (pool(), graphs()) == (None, None)
    finally:
        gc.enable()


def test_what_another_thread_computes_meanwhile_is_not_on_the_tape() -> None:
    assert KERNELS is not None
    ours, others = (torch.ones(2, 64, dtype=torch.bfloat16) for _ in range(2))
    weight, out = torch.ones(64, dtype=torch.bfloat16), torch.empty(2, 64, dtype=torch.bfloat16)

    def add_to(x: torch.Tensor) -> None:
        assert KERNELS is not None
        KERNELS.add_rms_norm(1, x.data_ptr(), weight.data_ptr(), weight.data_ptr(), out.data_ptr(), 1, 64, 1e-5, 1)

    with ThreadPoolExecutor(1) as pool:

        def run() -> None:
            add_to(ours)
            pool.submit(add_to, others).result()

        replay = TapeRecorder(KERNELS).record(run)
    for _ in range(3):
        replay()
    assert (ours[0, 0].item(), others[0, 0].item()) == (5.0, 2.0)


def test_operations_of_torch_come_between_the_calls_where_they_were() -> None:
    assert KERNELS is not None
    x, weight = torch.ones(1, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    seen = torch.zeros(64, dtype=torch.bfloat16)

    def run() -> None:
        doubled = torch.cat((x, x))[:1] * 2  # made anew each time, and read where it was
        out = torch.empty_like(doubled)
        args = (doubled.data_ptr(), None, weight.data_ptr(), out.data_ptr(), 1, 64, 0.0, 1)
        KERNELS.add_rms_norm(1, *args)
        seen.copy_(out[0]).mul_(doubled[0])

    replay = TapeRecorder(KERNELS).record(run)
    for value in (1.0, 3.0, 0.5):
        x.fill_(value)
        replay()
        assert seen.tolist() == [2 * value] * 64


def test_what_a_replay_writes_to_stays_when_the_recorder_goes_and_goes_with_the_replay() -> None:
    assert KERNELS is not None
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    recorder = TapeRecorder(KERNELS)
    scratch = weakref.ref(recorder._scratch)
    kept: list[torch.Tensor] = []
    replay = recorder.record(lambda: kept.append(torch.empty_like(x).copy_(x)))
    del recorder
    assert scratch() is not None
    x.fill_(3.0)
    replay()
    del replay
    assert scratch() is not None, "a tensor looks at it"
    assert kept.pop().tolist() == x.tolist()
    gc.collect()
    assert scratch() is None


def test_scratch_is_taken_again_only_when_nothing_looks_at_it() -> None:
    scratch, model = Scratch(), torch.empty(4, 100, dtype=torch.bfloat16)
    first = scratch.like(model)
    view = first[1:3].view(torch.int16)
    address = first.data_ptr()
    assert address % 64 == 0
    del first
    second = scratch.like(model)
    assert second.data_ptr() != address
    del view
    assert scratch.like(model).data_ptr() == address
    assert scratch.like(model.float()).data_ptr() not in (address, second.data_ptr())
