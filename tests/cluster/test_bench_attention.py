"""``kvferry bench attention``: the counting of its roofline, and whole runs on this machine."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cluster.bench.attention import contest
from cluster.bench.attention.case import KINDS, AttentionCase, AttentionGrid
from cluster.bench.attention.contest import AttentionOptions, compare_attention
from cluster.bench.attention.figures import AttentionOutcome, AttentionReport, EntryFigure, attention_remarks
from cluster.bench.attention.measure import layers_for
from cluster.bench.attention.plot import lines_of, write_attention_plot
from cluster.bench.attention.shape import SHAPES, HeadShape, shape_of
from cluster.bench.attention.work import work_of
from cluster.bench.machine import Machine
from cluster.bench.picture import SUFFIXES
from cluster.bench.preset import layout_of
from cluster.bench.roofline import Rates, Work, floor
from engine.attention import BACKENDS
from engine.attention.reference import ReferenceAttention
from engine.config import EngineConfig
from protocol.errors import ConfigError
from protocol.layout import KVLayout

SHAPE = HeadShape(heads=6, kv_heads=2, head_dim=16)


def grid(**changed: Any) -> AttentionGrid:
    values: dict[str, Any] = {"kinds": KINDS, "decodes": (1, 8), "prompts": (2,), "contexts": (40, 200), "chunk": 64}
    return AttentionGrid(**values | changed)


def options(**changed: Any) -> AttentionOptions:
    engine = {name: changed.pop(name) for name in ("model", "dtype", "device", "order") if name in changed}
    settings = {"model": "smollm2-135m", "dtype": "float32", "device": "cpu", "threads": 1} | engine
    values: dict[str, Any] = {"engine": EngineConfig(**settings), "backends": BACKENDS, "grid": grid()}
    values |= {"window": 0, "softcap": 0.0, "seconds": 0.01, "max_pool": 1 << 26, "seed": 0, "json": None, "plot": None}
    return AttentionOptions(**values | changed)


@given(
    batch=st.integers(1, 4),
    context=st.integers(1, 60),
    queries=st.integers(1, 60),
    window=st.sampled_from([0, 1, 2, 7, 31, 100]),
)
def test_the_work_is_that_of_the_pairs_that_are_seen(batch: int, context: int, queries: int, window: int) -> None:
    queries = min(queries, context)
    case = AttentionCase(kind="prefill", batch=batch, context=context, queries=queries)
    seen = torch.ones(queries, context).tril(context - queries)
    if window:
        seen = seen.triu(context - queries - window + 1)
    found = work_of(case, SHAPE, 2, window)
    assert found.flops == batch * int(seen.sum()) * SHAPE.heads * 4 * SHAPE.head_dim
    keys = int(seen.any(0).sum())
    assert found.nbytes == batch * 2 * SHAPE.head_dim * (2 * keys * SHAPE.kv_heads + 2 * queries * SHAPE.heads)


def test_the_floor_is_the_slower_of_the_two() -> None:
    assert floor(Work(nbytes=100, flops=10), Rates(read=10.0, multiply=10.0)) == (10.0, "memory")
    assert floor(Work(nbytes=100, flops=10), Rates(read=100.0, multiply=1.0)) == (10.0, "compute")


def test_the_grid_is_each_kind_with_its_batches_and_every_context() -> None:
    found = [(case.kind, case.batch, case.queries, case.context) for case in grid().cases()]
    decodes = [("decode", batch, 1, context) for batch in (1, 8) for context in (40, 200)]
    assert found == [*decodes, ("prefill", 2, 40, 40), ("prefill", 2, 64, 200)]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"decodes": (0,)}, r"decodes must lie in \[1, 1024\], got 0"),
        ({"prompts": (1, 2000)}, "prompts .* got 2000"),
        ({"contexts": (1 << 20,)}, "contexts .* got 1048576"),
        ({"chunk": 0}, "chunk .* got 0"),
    ],
)
def test_a_grid_names_the_value_that_is_wrong(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        grid(**changed)


def test_shapes_are_those_of_the_models_that_the_transfers_know(tmp_path: Path) -> None:
    for name in ("smollm2-135m", "llama-3-8b", "llama-3-70b-tp8"):
        layout = layout_of(name, block_size=16)
        assert (layout.kv_heads, layout.head_dim) == (SHAPES[name].kv_heads, SHAPES[name].head_dim)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes, **heads}))
    assert shape_of(str(tmp_path)) == HeadShape(heads=4, kv_heads=2, head_dim=16)
    with pytest.raises(ConfigError, match="neither a directory nor one of: smollm2-135m, "):
        shape_of("gpt-9")


def test_a_pool_has_the_layers_that_fit() -> None:
    layout = KVLayout(num_layers=1, kv_heads=2, head_dim=16, block_size=16)
    case = AttentionCase(kind="decode", batch=3, context=100, queries=1)
    one = layout.pool_bytes(3 * 7 + 1)
    assert [layers_for(case, layout, size) for size in (one, 3 * one - 1, 100 * one)] == [1, 2, 4]
    with pytest.raises(ConfigError, match=r"decode, 3 x 1, context 100: .* more than --max-pool allows"):
        layers_for(case, layout, one - 1)


def test_a_run_gives_a_table_json_and_a_line_for_the_plot(tmp_path: Path) -> None:
    file, out = tmp_path / "found.json", io.StringIO()
    small = grid(decodes=(2,), prompts=(1,), contexts=(90,))
    assert compare_attention(options(grid=small, window=30, softcap=5.0, json=file), Console(file=out, width=160))
    report = msgspec.json.decode(file.read_bytes(), type=AttentionReport)
    assert report.complete
    assert [(outcome.case.kind, outcome.layers) for outcome in report.outcomes] == [("decode", 4), ("prefill", 4)]
    states = [{figure.entry: figure.state for figure in outcome.figures} for outcome in report.outcomes]
    for found in states:
        assert found["sdpa"] == "measured"
        assert found["triton"] == "skipped"
    assert [found["reference"] for found in states] == ["measured", "skipped"]
    for outcome in report.outcomes:
        assert outcome.floor_seconds > 0
        assert outcome.rounds >= 3
        for figure in outcome.figures:
            if figure.state == "measured":
                assert figure.seconds > 0
                assert figure.fraction > 0
                assert figure.error < 1e-4
    assert "attention 'triton' needs a CUDA device" in out.getvalue()


def outcome(kind: Literal["decode", "prefill"], context: int) -> AttentionOutcome:
    figures = (
        EntryFigure(entry="sdpa", state="measured", seconds=0.002, fraction=0.5),
        EntryFigure(entry="triton", state="skipped", reason="a <b>"),
        EntryFigure(entry="native", state="wrong", seconds=0.001, fraction=1.0, error=3.0),
    )
    case = AttentionCase(kind=kind, batch=2, context=context, queries=1)
    return AttentionOutcome(
        case=case, layers=1, rounds=3, nbytes=8, flops=8, floor_seconds=0.001, bound="memory", figures=figures
    )


REPORT = AttentionReport(
    kvferry="0",
    machine=Machine(system="s", processor="p", cores=2, memory_bytes=1, python="3"),
    device="cpu",
    model="<m>",
    shape=SHAPE,
    dtype="float32",
    order="NHD",
    block_size=16,
    window=0,
    softcap=0.0,
    threads=1,
    read_gb_per_s=1.0,
    multiply_tflop_per_s=1.0,
    outcomes=(outcome("decode", 200), outcome("decode", 40), outcome("prefill", 40)),
    complete=True,
)


def test_a_line_is_of_one_backend_and_one_number_of_sequences_by_growing_context() -> None:
    assert lines_of(REPORT) == {("decode", "sdpa, 2"): [(40, 0.5), (200, 0.5)], ("prefill", "sdpa, 2"): [(40, 0.5)]}


def test_each_reason_is_told_once() -> None:
    assert attention_remarks(REPORT).count("skipped triton: a <b>") == 1


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_plot_is_written(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    file = tmp_path / f"x{suffix}"
    write_attention_plot(REPORT, file)
    if suffix == ".png":
        assert file.read_bytes().startswith(b"\x89PNG")
    else:
        assert b"<!-- sdpa, 2 -->" in file.read_bytes()
    if suffix == ".html":
        assert b"a &lt;b&gt;" in file.read_bytes()


def test_a_backend_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(ReferenceAttention):
        def plan(self, batch: Any) -> Any:
            plan = super().plan(batch)
            monkeypatch.setattr(plan, "forward", lambda q, *_: torch.zeros_like(q))
            return plan

    monkeypatch.setattr("cluster.bench.attention.measure.create_backend", lambda _name, *where: Wrong(*where))
    out = io.StringIO()
    one = grid(kinds=("decode",), decodes=(1,), contexts=(20,))
    assert not compare_attention(options(grid=one, backends=("sdpa",)), Console(file=out, width=160))
    assert " wrong" in out.getvalue()


def test_a_run_that_is_cut_short_tells_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = contest.measure_case

    def once(case: AttentionCase, *rest: Any) -> Any:
        if case.batch == 8:
            raise KeyboardInterrupt
        return measured(case, *rest)

    monkeypatch.setattr(contest, "measure_case", once)
    out = io.StringIO()
    some = grid(kinds=("decode",), contexts=(20,))
    with pytest.raises(KeyboardInterrupt):
        compare_attention(options(grid=some, backends=("sdpa",)), Console(file=out, width=160))
    assert "cut short" in out.getvalue()
    assert "decode" in out.getvalue()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"json": Path("/nowhere/x.json")}, "json: there is no folder /nowhere"),
        ({"plot": Path("x.gif")}, r"plot must end in .*, got 'x\.gif'"),
        ({"max_pool": 1000}, "max-pool"),
        ({"model": "gpt-9"}, "model 'gpt-9'"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_measured(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compare_attention(options(**changed), Console(file=io.StringIO()))
