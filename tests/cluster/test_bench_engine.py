"""``kvferry bench engine``: the counting of its roofline, what its steps compute, and whole runs against rivals."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import vllm_stand_in
from rich.console import Console
from safetensors import safe_open
from typer.testing import CliRunner

from cluster.bench.engine import contest
from cluster.bench.engine.case import KINDS, EngineCase, EngineGrid
from cluster.bench.engine.contest import EngineOptions, compare_engines, planned
from cluster.bench.engine.figures import EngineFigure, EngineOutcome, EngineReport, engine_remarks
from cluster.bench.engine.ours import Ours
from cluster.bench.engine.plot import lines_of, write_engine_plot
from cluster.bench.engine.work import work_of
from cluster.bench.machine import Machine
from cluster.bench.picture import SUFFIXES
from cluster.bench.rivals.contest import Invitation, RivalState
from cluster.cli import app
from engine.batch import Chunk, Draw
from engine.config import EngineConfig
from engine.models.config import ModelConfig
from engine.stepper import Stepper
from protocol.errors import ConfigError, PoolExhausted


def grid(**changed: Any) -> EngineGrid:
    values: dict[str, Any] = {"kinds": KINDS, "decodes": (1, 2), "prompts": (1, 2), "contexts": (20,), "steps": 3}
    return EngineGrid(**{"max_prompt_tokens": 1000, **values, **changed})


def options(model: Path, *vs: str, **changed: Any) -> EngineOptions:
    engine = EngineConfig(model=str(model), dtype="float32", device="cpu", threads=1, max_batch_tokens=32)
    values: dict[str, Any] = {"engine": engine, "grid": grid(), "seconds": 0.01, "max_pool": 1 << 26, "seed": 0}
    values |= {"cpu_time": False, "json": None, "plot": None, "rivals": Invitation(vs, sys.executable)}
    return EngineOptions(**values | changed)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path of the processes that are started; what is installed there is found."""
    folder = tmp_path / "packages"
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return folder


def test_the_grid_is_each_kind_with_every_batch_and_context() -> None:
    found = [str(case) for case in grid(contexts=(20, 30), decodes=(1, 1), prompts=(1, 1)).cases()]
    assert found == ["decode, 1 x 20", "decode, 1 x 30", "prefill, 1 x 20", "prefill, 1 x 30"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"decodes": (0,)}, r"decodes must lie in \[1, 1024\], got 0"),
        ({"contexts": (20, 2)}, r"contexts must lie in \[3, 131072\], got 2"),
        ({"steps": 0}, "steps .* got 0"),
    ],
)
def test_a_grid_names_the_value_that_is_wrong(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        grid(**changed)


def test_the_work_is_that_of_the_weights_of_the_checkpoint(tiny_llama_dir: Path) -> None:
    config = ModelConfig.read(tiny_llama_dir)
    matrices = 0
    with safe_open(tiny_llama_dir / "model.safetensors", framework="pt") as shard:
        shapes = {name: shard.get_slice(name).get_shape() for name in shard.keys()}  # noqa: SIM118
    for name, shape in shapes.items():
        if len(shape) == 2 and (config.tied_embeddings or "embed" not in name):
            matrices += shape[0] * shape[1]
    head = config.vocab_size * config.hidden_size
    width, per_token = config.num_heads * config.head_dim, 2 * config.kv_heads * config.head_dim
    decode = work_of(EngineCase(kind="decode", batch=3, context=50), config, 2, 1)
    assert decode.nbytes == 2 * matrices + 3 * config.num_layers * (50 * per_token + 2 * width)
    assert decode.flops == 3 * (2 * matrices + config.num_layers * 4 * width * 50)
    prompt = work_of(EngineCase(kind="prefill", batch=1, context=50), config, 2, 2)
    pairs = 50 * 51 // 2
    assert prompt.flops == 2 * (50 * (matrices - head) + head) + config.num_layers * 4 * width * pairs


class Noted:
    """A stepper that tells which tokens a step computes."""

    def __init__(self, stepper: Stepper) -> None:
        self.runner = stepper.runner
        self.steps: list[list[tuple[int, int]]] = []
        self._stepper = stepper

    async def execute(self, chunks: Sequence[Chunk]) -> list[Draw | None]:
        self.steps.append([(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in chunks])
        return await self._stepper.execute(chunks)


def test_our_steps_compute_what_the_case_says(tiny_llama_dir: Path) -> None:
    async def run() -> list[list[tuple[int, int]]]:
        stepper = await Stepper.load(options(tiny_llama_dir).engine)
        try:
            noted = Noted(stepper)
            ours = Ours(noted)  # type: ignore[arg-type]
            assert len(await ours.turn(EngineCase(kind="decode", batch=2, context=40), 3)) == 3
            assert len(await ours.turn(EngineCase(kind="prefill", batch=2, context=40), 3)) == 1
            with pytest.raises(PoolExhausted, match="200 sequences of 400 tokens do not fit"):
                await ours.decode(200, 400, 1)
            return noted.steps
        finally:
            stepper.close()

    steps = asyncio.run(run())
    # The first one does not count; the next sees 40 tokens, its own included.
    assert steps[:4] == [[(38, 39)] * 2, [(39, 40)] * 2, [(40, 41)] * 2, [(41, 42)] * 2]
    assert sum(stop - start for chunks in steps[4:] for start, stop in chunks) == 2 * 40
    assert max(sum(stop - start for start, stop in chunks) for chunks in steps) == 32


def test_a_run_holds_ours_against_the_floor_and_transformers(tiny_llama_dir: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "found.json", io.StringIO()
    some = grid(decodes=(2,), prompts=(2,), contexts=(20, 600, 1 << 16), max_prompt_tokens=100)
    assert compare_engines(options(tiny_llama_dir, "transformers", grid=some, json=file), Console(file=out, width=160))
    report = msgspec.json.decode(file.read_bytes(), type=EngineReport)
    assert report.complete
    measured = {str(outcome.case): outcome for outcome in report.outcomes if outcome.figures}
    reasons = {str(outcome.case): outcome.reason for outcome in report.outcomes if outcome.reason}
    assert list(measured) == ["decode, 2 x 20", "prefill, 2 x 20"]
    positions = ModelConfig.read(tiny_llama_dir).max_positions
    assert reasons["decode, 2 x 65536"] == f"the model has {positions} positions"
    for outcome in measured.values():
        ours, theirs = outcome.figures
        assert (ours.engine, theirs.engine, ours.ratio) == ("kvferry", "transformers", 1.0)
        assert outcome.rounds >= 5
        assert outcome.floor_seconds > 0
        for figure in outcome.figures:
            assert min(figure.seconds, figure.fraction, figure.ratio, figure.tokens_per_s) > 0
    assert "over that of transformers" in out.getvalue()
    assert f"the model has {positions} positions" in out.getvalue()


def test_cases_are_left_out_for_what_they_would_take(tiny_llama_dir: Path) -> None:
    some = grid(kinds=("decode", "prefill"), decodes=(1, 4), prompts=(1, 4), contexts=(100,), max_prompt_tokens=200)
    plan = planned(options(tiny_llama_dir, grid=some))
    assert [str(case) for case in plan.cases] == ["decode, 1 x 100", "decode, 4 x 100", "prefill, 1 x 100"]
    assert list(plan.skipped.values()) == ["more than --max-prompt-tokens allows (200)"]
    assert plan.config.max_sequences == 4
    assert plan.config.max_model_len == 103
    with pytest.raises(ConfigError, match=r"no case is left: more cache than --max-pool allows \(0 MiB\)"):
        planned(options(tiny_llama_dir, grid=some, max_pool=1000))


def test_vllm_takes_the_same_steps(tiny_llama_dir: Path, stand_in: Path, tmp_path: Path) -> None:
    notes = vllm_stand_in.install(stand_in)
    file = tmp_path / "found.json"
    small = grid(decodes=(2,), prompts=(2,))
    assert compare_engines(options(tiny_llama_dir, "vllm", grid=small, json=file), Console(file=io.StringIO()))
    report = msgspec.json.decode(file.read_bytes(), type=EngineReport)
    (state,) = report.rivals
    assert (state.rival, state.version, state.reason) == ("vllm", "9.8.7", "")
    assert "64 tokens a step, blocks of 32" in state.settings
    seen = [json.loads(line) for line in notes.read_text().splitlines()]
    rounds = report.outcomes[0].rounds
    # The tokens that each step's last query sees, of two sequences; the first step of four does not count.
    assert seen[: 4 * (1 + rounds)] == [[19] * 2, [20] * 2, [21] * 2, [22] * 2] * (1 + rounds)
    assert seen[4 * (1 + rounds) :] == [[20] * 2] * (1 + report.outcomes[1].rounds)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("assert self.steps < 20", "AssertionError"),
        ("self.requests.pop() if self.steps > 19 and self.requests else None", "2 x 20"),
    ],
)
def test_a_rival_that_fails_drops_out_and_spoils_no_case(
    fault: str, reason: str, tiny_llama_dir: Path, stand_in: Path, tmp_path: Path
) -> None:
    vllm_stand_in.install(stand_in, fault=fault)
    file = tmp_path / "found.json"
    small = grid(decodes=(2,), prompts=(2,))
    assert not compare_engines(options(tiny_llama_dir, "vllm", grid=small, json=file), Console(file=io.StringIO()))
    report = msgspec.json.decode(file.read_bytes(), type=EngineReport)
    assert [[figure.engine for figure in outcome.figures] for outcome in report.outcomes] == [["kvferry"]] * 2
    assert report.rivals[-1].reason.startswith("decode, 2 x 20: ")
    assert reason in report.rivals[-1].reason


def test_a_rival_that_is_not_there_is_one_line(tiny_llama_dir: Path) -> None:
    out = io.StringIO()
    small = grid(kinds=("decode",), decodes=(1,), prompts=(1,))
    assert not compare_engines(options(tiny_llama_dir, "vllm", grid=small), Console(file=out, width=160))
    assert f"vs vllm: vllm is not installed for {sys.executable}" in out.getvalue().replace("\n", "")


def test_a_run_that_is_cut_short_tells_what_it_has(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = contest.measure_case

    async def once(case: EngineCase, *rest: Any) -> Any:
        if case.batch == 2:
            raise KeyboardInterrupt
        return await measure(case, *rest)

    monkeypatch.setattr(contest, "measure_case", once)
    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        compare_engines(options(tiny_llama_dir, grid=grid(kinds=("decode",))), Console(file=out, width=160))
    assert "cut short" in out.getvalue()
    assert "decode" in out.getvalue()


def outcome(batch: int, context: int) -> EngineOutcome:
    figures = (
        EngineFigure(engine="kvferry", seconds=0.002, tokens_per_s=500.0 * batch, fraction=0.5, ratio=1.0),
        EngineFigure(engine="vllm", seconds=0.004, tokens_per_s=250.0 * batch, fraction=0.25, ratio=2.0),
    )
    case = EngineCase(kind="decode", batch=batch, context=context)
    return EngineOutcome(case=case, rounds=5, nbytes=8, flops=8, floor_seconds=0.001, figures=figures)


SKIPPED = EngineOutcome(case=EngineCase(kind="prefill", batch=1, context=9), reason="too <long>")
REPORT = EngineReport(
    kvferry="0",
    machine=Machine(system="s", processor="p", cores=2, memory_bytes=1, python="3"),
    device="cpu",
    model="<m>",
    dtype="bfloat16",
    cache_dtype="float8_e4m3",
    attention="auto",
    threads=1,
    block_size=16,
    chunk=512,
    steps=8,
    seed=0,
    cpu_time=False,
    read_gb_per_s=1.0,
    multiply_tflop_per_s=1.0,
    rivals=(RivalState(rival="vllm", version="1"),),
    outcomes=(outcome(1, 200), outcome(1, 40), SKIPPED),
    complete=True,
)


def test_a_line_is_of_one_engine_and_one_number_of_sequences_by_growing_context() -> None:
    assert lines_of(REPORT) == {
        ("decode", "kvferry", 1): [(40, 500.0), (200, 500.0)],
        ("decode", "vllm", 1): [(40, 250.0), (200, 250.0)],
        ("decode", "floor", 1): [(40, 1000.0), (200, 1000.0)],
    }


def test_what_was_skipped_is_told_by_reason() -> None:
    assert "skipped prefill, 1 x 9: too <long>" in engine_remarks(REPORT)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_plot_is_written(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    file = tmp_path / f"x{suffix}"
    write_engine_plot(REPORT, file)
    if suffix == ".png":
        assert file.read_bytes().startswith(b"\x89PNG")
    else:
        assert b"<!-- kvferry, 1 -->" in file.read_bytes()
    if suffix == ".html":
        assert b"too &lt;long&gt;" in file.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--vs", "pigeon"), "vs must be of transformers, vllm, got 'pigeon'"),
        (("--context", "1m"), "contexts must lie in [3, 131072], got 1048576"),
        (("--cpu-time",), "--cpu-time counts one thread of a CPU: add --threads 1"),
        (("--json", "/nowhere/x.json"), "json: there is no folder /nowhere"),
    ],
)
def test_an_option_that_cannot_be_is_said(arguments: tuple[str, ...], said: str, tiny_llama_dir: Path) -> None:
    found = CliRunner().invoke(app, ["bench", "engine", "--model", str(tiny_llama_dir), *arguments])
    assert isinstance(found.exception, ConfigError)
    assert said in found.exception.message
