"""Steps of decodes that are recorded and replayed: which, how they are padded, and that their logits are the same.

On a CPU what is recorded is run again, call by call. Capture itself is for the tests marked ``gpu``.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import tiny_llama, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_decodes import CPU, Rerun, StaticAttention

from engine.batch import BatchLimits, Chunk, flatten
from engine.config import EngineConfig
from engine.decode_inputs import DecodeInputs
from engine.graph_batches import MOST, batch_for, default_batches
from engine.layer_watch import LayerWatch
from engine.prompt_logprobs import PromptSpan
from engine.runner import ModelRunner
from protocol.errors import ConfigError, EngineFailure
from protocol.layout import PADDING_BLOCK
from protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
SIZES = (1, 2, 4, 7)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def runner_of(path: Path, **settings: Any) -> ModelRunner:
    given = {"dtype": "float32", "num_blocks": 40, "block_size": 4, "attention": "sdpa", "threads": 1, **settings}
    return ModelRunner.load(EngineConfig(model=str(path), **given))


def recorded(runner: ModelRunner) -> Rerun:
    runner._backend = StaticAttention(runner.layout, CPU)
    recorder = Rerun()
    assert runner.capture_decodes(recorder) == (runner.config.cuda_graph_batches or default_batches(64))
    return recorder


# --- which ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(most=st.integers(1, 4096))
def test_sizes_rise_to_the_limit_and_padding_stays_small(most: int) -> None:
    sizes = default_batches(most)
    assert list(sizes) == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, min(most, MOST))
    assert len(sizes) <= 32
    for rows in range(1, sizes[-1] + 1):
        size = batch_for(sizes, rows)
        assert size is not None
        assert rows <= size < max(2 * rows, rows + 8)
    assert batch_for(sizes, sizes[-1] + 1) is None


def test_the_sizes_of_the_default() -> None:
    assert default_batches(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert default_batches(20) == (1, 2, 4, 8, 16, 20)
    assert default_batches(20, every=6) == (1, 2, 3, 4, 5, 6, 8, 16, 20)
    assert default_batches(3, every=6) == (1, 2, 3)


@pytest.mark.parametrize("sizes", [(), (0, 1), (2, 1), (1, 1), (1, 513), (True, 2), (1.0,), [1, "2"]])
def test_bad_sizes_are_named(sizes: Any) -> None:
    with pytest.raises(ConfigError, match="cuda_graph_batches must be ascending numbers in") as caught:
        EngineConfig(model="m", cuda_graph_batches=sizes)
    assert caught.value.field == "cuda_graph_batches"
    with pytest.raises(ConfigError, match="cuda_graphs must be one of auto, off, got 'on'"):
        EngineConfig(model="m", cuda_graphs="on")  # type: ignore[arg-type]


# --- what is in the buffers -----------------------------------------------------------------------------------------


def test_padding_is_in_the_reserved_block_and_nothing_of_the_step_before_is_left() -> None:
    inputs, limits = DecodeInputs(8, 10, Rerun()), BatchLimits(4, 40, 50, 40)
    many = [Chunk([row], 8 + row, [row + 1, row + 11, row + 21, row + 31], GREEDY) for row in range(7)]
    few = [Chunk([9], 4, [3, 8], GREEDY), Chunk([7], 0, [5], GREEDY), Chunk([6], 12, [12, 13, 14, 15], GREEDY)]
    for chunks, size in ((many, 8), (few, 4), (few[:1], 1)):
        batch, rows = flatten(chunks, limits), inputs.rows.first(size)
        inputs.fill(batch, size)
        count, width = batch.block_table.shape
        assert [len(tensor) for tensor in rows.tensors()] == [size] * 5
        for tensor, wanted, padding in zip(
            rows.tensors(),
            (batch.token_ids, batch.positions, batch.slot_mapping, batch.seq_lens),
            (0, 0, PADDING_BLOCK * 4, 1),
            strict=False,
        ):
            assert tensor.tolist() == [*wanted.tolist(), *[padding] * (size - count)]
        assert np.array_equal(rows.block_tables[:count, :width].numpy(), batch.block_table)
        assert (rows.block_tables[count:, 0] == PADDING_BLOCK).all()


# --- that it is the same --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("graphs")
    capped = {"head_dim": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "sliding_window": 9}
    return {
        "llama": tiny_llama(folder / "llama"),
        "gemma2": tiny_model(folder / "gemma2", family="gemma2", **capped),
        "mixtral": tiny_model(folder / "mixtral", family="mixtral", num_local_experts=4),
    }


class Sequences:
    """Sequences that grow by steps of decodes, each in scattered blocks."""

    def __init__(self, runner: ModelRunner, seed: int) -> None:
        self.rng = random.Random(seed)
        self.runner = runner
        blocks = list(range(1, runner.num_blocks))
        self.rng.shuffle(blocks)
        self.tables = [blocks[4 * row : 4 * row + 4] for row in range(9)]
        self.lengths = [0] * 9

    def prompts(self) -> list[Chunk]:
        self.lengths = [self.rng.randint(1, 10) for _ in self.lengths]
        return [
            Chunk([self.rng.randrange(5, 250) for _ in range(length)], 0, table, GREEDY)
            for length, table in zip(self.lengths, self.tables, strict=True)
        ]

    def step(self, rows: int) -> list[Chunk]:
        chosen = self.rng.sample(range(9), rows)
        chunks = [Chunk([self.rng.randrange(5, 250)], self.lengths[row], self.tables[row], GREEDY) for row in chosen]
        for row in chosen:
            self.lengths[row] += 1
        return chunks


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_a_padded_replay_gives_the_logits_of_the_step_that_is_not(
    models: dict[str, Path], name: str, order: str
) -> None:
    plain, replaying = (runner_of(models[name], order=order, cuda_graph_batches=SIZES) for _ in range(2))
    for runner in (plain, replaying):
        runner.cache.tensor.fill_(torch.nan)
    recorder = recorded(replaying)
    assert not torch.isnan(replaying.cache.tensor[PADDING_BLOCK]).all()
    assert torch.isnan(replaying.cache.tensor[1:]).all(), "capturing wrote a block"
    sequences = Sequences(plain, seed=3)
    prompts = sequences.prompts()
    for runner in (plain, replaying):
        runner.execute(prompts)
    assert not recorder.replayed
    # Recorded from the largest down.
    for rows, number in ((1, 3), (2, 2), (3, 1), (4, 1), (5, 0), (7, 0), (1, 3), (6, 0)):
        chunks = sequences.step(rows)
        torch.testing.assert_close(replaying.logits(chunks), plain.logits(chunks), rtol=1e-4, atol=1e-4)
        assert recorder.replayed[-1] == number
    assert len(recorder.replayed) == 8
    torch.testing.assert_close(replaying.cache.tensor[1:], plain.cache.tensor[1:], rtol=1e-4, atol=1e-4, equal_nan=True)


def test_what_is_not_one_token_each_is_launched_call_by_call(models: dict[str, Path]) -> None:
    runner = runner_of(models["llama"], cuda_graph_batches=SIZES)
    recorder, sequences = recorded(runner), Sequences(runner, seed=4)
    runner.execute(sequences.prompts())
    decodes = sequences.step(3)
    for chunks in (sequences.step(8), [*decodes, Chunk([1, 2], 0, [40 - 1], GREEDY)], [*decodes, Chunk([1], 0, [39])]):
        runner.execute(chunks)
    runner.execute(decodes, LayerWatch(1, lambda _: None))
    told: list[object] = []
    runner.execute([*decodes[:2], replace(decodes[2], span=PromptSpan(0, [7], 0, told.append))])
    assert told
    assert not recorder.replayed
    drawn = runner.execute(decodes)
    assert recorder.replayed == [1]
    runner._graphs = None
    assert runner.execute(decodes) == drawn


def test_a_step_that_fails_in_a_replay_is_an_engine_failure(models: dict[str, Path]) -> None:
    runner = runner_of(models["llama"], cuda_graph_batches=(1,))
    recorded(runner)
    runner.cache.tensor[9] = torch.nan
    with pytest.raises(EngineFailure, match="not finite"):
        runner.execute([Chunk([5], 3, [9], GREEDY)])


# --- where it cannot be ---------------------------------------------------------------------------------------------


def test_models_and_backends_that_look_at_values_are_left_alone(
    models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "engine")
    mixtral = runner_of(models["mixtral"])
    mixtral._backend = StaticAttention(mixtral.layout, CPU)
    llama = runner_of(models["llama"])
    recorder = Rerun()
    assert mixtral.capture_decodes(recorder) == llama.capture_decodes(recorder) == ()
    assert recorder.recorded == 0
    assert [record.message for record in caplog.records] == [
        "decodes are not captured: the model looks at values of its step",
        "decodes are not captured: the attention backend looks at values of its step",
    ]
    for runner in (mixtral, llama):
        assert runner.execute([Chunk([5], 0, [9], GREEDY)]) != [None]


def test_a_capture_that_fails_leaves_steps_as_they_were(
    models: dict[str, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(models["llama"], cuda_graph_batches=SIZES)
    runner._backend = StaticAttention(runner.layout, CPU)
    recorder = Rerun()

    def third_fails(run: Callable[[], None]) -> Callable[[], None]:
        if recorder.recorded == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return Rerun.record(recorder, run)

    monkeypatch.setattr(recorder, "record", third_fails)
    assert runner.capture_decodes(recorder) == ()
    assert "cannot be captured: operation not permitted" in caplog.text
    assert runner.execute([Chunk([5], 0, [9], GREEDY)]) != [None]
    assert not recorder.replayed


def test_nothing_is_captured_where_there_is_no_gpu(models: dict[str, Path]) -> None:
    runner = runner_of(models["llama"])
    runner.warm_up()
    assert runner._graphs is None


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_steps_give_the_same_on_the_gpu(tmp_path: Path, dtype: str) -> None:
    model = tiny_llama(tmp_path / "wide", head_dim=64)
    same = {"attention": "triton", "device": "cuda:0", "dtype": dtype, "cuda_graph_batches": SIZES}
    plain, replaying = (runner_of(model, **same, cuda_graphs=mode) for mode in ("off", "auto"))
    for runner in (plain, replaying):
        runner.warm_up()
    assert plain._graphs is None
    assert replaying._graphs is not None
    assert replaying._graphs.captured == SIZES
    sequences = Sequences(plain, seed=5)
    prompts = sequences.prompts()
    for runner in (plain, replaying):
        runner.execute(prompts)
    tolerance = 1e-4 if dtype == "float32" else 2.0**-5
    for rows in (1, 2, 3, 7, 5, 1, 8):
        chunks = sequences.step(rows)
        wanted, found = plain.logits(chunks), replaying.logits(chunks)
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@needs_cuda
def test_a_replayed_greedy_step_waits_for_the_gpu_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(tmp_path / "wide", head_dim=64)
    runner = runner_of(model, attention="triton", device="cuda:0", cuda_graph_batches=SIZES)
    runner.warm_up()
    chunks = [Chunk([5], 0, [row], GREEDY) for row in (3, 4, 5)]
    runner.execute(chunks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first time it tells that it may miss some
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as told:
            runner.execute(chunks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(told) == 1
