"""The C++ kernels equal their torch references, and everything works without them."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import create_backend
from engine.batch import Chunk
from engine.config import EngineConfig
from engine.fused import NativeOps, TorchOps, fused_ops
from engine.models.linear import Linear, NativeWeight
from engine.native.build import build
from engine.native.library import load
from engine.native.weight_memory import WeightMemory
from engine.runner import ModelRunner
from protocol.errors import ConfigError
from protocol.layout import KVLayout
from protocol.sampling import SamplingParams

CPU = torch.device("cpu")
KERNELS = load()
needs_kernels = pytest.mark.skipif(KERNELS is None, reason="no C++ compiler")
needs_dots = pytest.mark.skipif(KERNELS is None or KERNELS.linear_kind == 0, reason="no bfloat16 dot products")
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7}
GREEDY = SamplingParams(temperature=0.0)


def randn(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@needs_kernels
@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 9),
    size=st.sampled_from([1, 15, 16, 17, 96, 576]),
    dtype=st.sampled_from(sorted(ROUNDING, key=str)),
    added=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 1 << 16),
)
def test_fused_operations_equal_torch(
    tokens: int, size: int, dtype: torch.dtype, added: bool, scale: float, seed: int
) -> None:
    native, exact = NativeOps(KERNELS, dtype), TorchOps()
    x, delta, weight = (
        randn(seed + part, *shape, scale=scale).to(dtype)
        for part, shape in enumerate(((tokens, size), (tokens, size), (size,)))
    )
    sums = (x.float() + delta.float()).to(dtype) if added else x.clone()
    expected = exact.add_rms_norm(sums.float(), None, weight.float(), 1e-5)
    found = native.add_rms_norm(x, delta if added else None, weight, 1e-5)
    torch.testing.assert_close(found.float(), expected, rtol=ROUNDING[dtype], atol=1e-6)
    assert torch.equal(x, sums)

    gate_up = randn(seed + 3, tokens, 2 * size, scale=scale).to(dtype)
    found = native.silu_and_mul(gate_up)
    torch.testing.assert_close(
        found.float(), exact.silu_and_mul(gate_up.float()), rtol=ROUNDING[dtype], atol=scale**2 * 1e-7
    )


@needs_kernels
@pytest.mark.parametrize("dtype", ROUNDING)
def test_silu_at_the_ends_and_of_nan(dtype: torch.dtype) -> None:
    ops = NativeOps(KERNELS, dtype)
    gate = torch.tensor([-1e30, -88.0, -87.0, -20.0, -0.0, 20.0, 88.0, 1e30, torch.nan], dtype=dtype)
    found = ops.silu_and_mul(torch.cat((gate, torch.ones_like(gate)))[None])[0].float()
    expected = torch.nn.functional.silu(gate.float())
    torch.testing.assert_close(found, expected, rtol=ROUNDING[dtype], atol=1e-6 + 1e30 * 1e-36, equal_nan=True)
    x = torch.ones(2, 20, dtype=dtype)
    x[1, 3] = torch.nan
    normed = ops.add_rms_norm(x, None, torch.ones(20, dtype=dtype), 1e-5)
    assert torch.isnan(normed).any(dim=1).tolist() == [False, True]


@needs_dots
@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(range(1, (KERNELS.linear_kind if KERNELS else 1) + 1)),
    rows=st.integers(1, 70),
    outputs=st.sampled_from([1, 15, 16, 17, 31, 32, 33, 100]),
    inputs=st.sampled_from([1, 31, 32, 33, 64, 160]),
    bias=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_a_packed_product_is_exact_to_its_rounding_and_blind_to_the_batch(
    kind: int, rows: int, outputs: int, inputs: int, bias: bool, seed: int
) -> None:
    weight = randn(seed, outputs, inputs).bfloat16()
    x = randn(seed + 1, rows, inputs).bfloat16()
    shift = randn(seed + 2, outputs).bfloat16() if bias else None
    packed = NativeWeight(KERNELS, weight, kind)
    found = packed.product(x, shift)
    exact = x.double() @ weight.double().T + (shift.double() if shift is not None else 0.0)
    torch.testing.assert_close(found.double(), exact, rtol=2.0**-8, atol=inputs * 1e-6)
    row = seed % rows
    assert torch.equal(packed.product(x[row : row + 1], shift)[0], found[row])


@needs_dots
@pytest.mark.parametrize("kind", range(1, (KERNELS.linear_kind if KERNELS else 1) + 1))
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(33, 80, 672), (300, 48, 1312), (290, 33, 3200)],  # inputs in parts, rows in groups, and groups in parts
)
def test_a_large_packed_product_gives_each_row_what_it_gets_alone(
    kind: int, rows: int, outputs: int, inputs: int
) -> None:
    weight, x = randn(0, outputs, inputs).bfloat16(), randn(1, rows, inputs).bfloat16()
    packed = NativeWeight(KERNELS, weight, kind)
    found = packed.product(x, None)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=2.0**-8, atol=inputs * 1e-6)
    for row in (0, 31, 32, rows // 2, rows - 1):
        assert torch.equal(packed.product(x[row : row + 1], None)[0], found[row])


@needs_dots
@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(range(1, (KERNELS.linear_kind if KERNELS else 1) + 1)),
    rows=st.integers(1, 70),
    inner=st.sampled_from([1, 15, 16, 17, 48, 100]),
    bias=st.booleans(),
    scale=st.sampled_from([0.1, 1.0, 20.0]),
    seed=st.integers(0, 1 << 16),
)
def test_a_gated_product_is_exact_to_its_rounding_and_blind_to_the_batch(
    kind: int, rows: int, inner: int, bias: bool, scale: float, seed: int
) -> None:
    weight = randn(seed, 2 * inner, 64, scale=scale).bfloat16()
    x = randn(seed + 1, rows, 64).bfloat16()
    shift = randn(seed + 2, 2 * inner).bfloat16() if bias else None
    packed = NativeWeight(KERNELS, weight, kind, gated=True)
    found = packed.product(x, shift)
    both = x.double() @ weight.double().T + (shift.double() if shift is not None else 0.0)
    exact = TorchOps().silu_and_mul(both)
    torch.testing.assert_close(found.double(), exact, rtol=2.0**-7, atol=scale**2 * 1e-3)
    row = seed % rows
    assert torch.equal(packed.product(x[row : row + 1], shift)[0], found[row])


@needs_dots
def test_a_strided_input_is_taken_as_what_it_means() -> None:
    packed = NativeWeight.of(randn(0, 48, 64).bfloat16())
    wide = randn(1, 5, 128).bfloat16()
    assert torch.equal(packed.product(wide[:, :64], None), packed.product(wide[:, :64].contiguous(), None))


@needs_dots
def test_a_linear_keeps_one_copy_of_its_weight() -> None:
    linear = Linear(64, 48, bias=True, dtype=torch.bfloat16, device=CPU)
    parts = linear.part("at")
    parts["at.weight"].copy_(randn(0, 48, 64))
    parts["at.bias"].copy_(randn(1, 48))
    x = randn(2, 3, 64).bfloat16()
    before = linear(x)
    del parts
    linear.pack()
    torch.testing.assert_close(linear(x), before, rtol=2.0**-6, atol=2.0**-6)
    assert linear._weight.numel() == 0


def test_memory_of_weights_is_zeros_in_cache_lines_of_its_own() -> None:
    memory = WeightMemory()
    pieces = [memory.take(size, torch.bfloat16) for size in (1, 33, 5 << 20, 20 << 20, 7, 12 << 20)]
    spans = sorted((piece.data_ptr(), piece.nbytes) for piece in pieces)
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(spans))
    for number, piece in enumerate(pieces):
        ends = torch.cat((piece[:100], piece[-100:]))
        assert not ends.any()
        piece[0], piece[-1] = number, number
    assert [int(piece[-1]) for piece in pieces] == list(range(len(pieces)))


@needs_dots
def test_what_a_sequence_gets_does_not_depend_on_the_others(tmp_path: Path) -> None:
    tiny_model(tmp_path, num_attention_heads=6, num_key_value_heads=2, hidden_size=96, dtype="bfloat16")
    runner = ModelRunner.load(EngineConfig(model=str(tmp_path), dtype="bfloat16", num_blocks=64, threads=1))
    rng = random.Random(4)
    prompts = [[rng.randrange(272) for _ in range(length)] for length in (3, 16, 40, 65)]
    tables = [list(range(1 + 5 * row, 6 + 5 * row)) for row in range(len(prompts))]
    for prompt, table in zip(prompts, tables, strict=True):
        runner.execute([Chunk(prompt, 0, table)])
    decodes = [Chunk([7], len(prompt), table, GREEDY) for prompt, table in zip(prompts, tables, strict=True)]
    together = runner.logits(decodes)
    assert torch.equal(together, torch.cat([runner.logits([chunk]) for chunk in decodes]))


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_share_the_work_and_change_nothing(dtype: str, tmp_path: Path) -> None:
    tiny_model(tmp_path, num_attention_heads=8, num_key_value_heads=2, head_dim=32, dtype=dtype)
    before, answers = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            runner = ModelRunner.load(EngineConfig(model=str(tmp_path), dtype=dtype, num_blocks=64, threads=threads))
            steps = [
                [Chunk(list(range(90)), 0, list(range(1, 8)), GREEDY), Chunk([5, 6, 7], 0, [9, 10], GREEDY)],
                [Chunk([11], 90, list(range(1, 8)), GREEDY), Chunk([12], 3, [9, 10], GREEDY)],
            ]
            answers.append(torch.cat([runner.logits(chunks) for chunks in steps]))
    finally:
        torch.set_num_threads(before)
    if dtype == "bfloat16" and KERNELS.linear_kind:
        assert torch.equal(*answers)
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-4)


def test_without_a_compiler_torch_gives_the_same(tmp_path: Path) -> None:
    bounds = {"float32": 1e-5, "bfloat16": 0.05}
    shape = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}
    models = {dtype: str(tiny_model(tmp_path / dtype, dtype=dtype, **shape)) for dtype in bounds}
    program = f"""
import json, torch
from engine.attention import create_backend
from engine.batch import Chunk
from engine.config import EngineConfig
from engine.native.library import load
from engine.native.weight_memory import WeightMemory
from engine.runner import ModelRunner
from protocol.sampling import SamplingParams
backends, logits = [], {{}}
for dtype, model in {models}.items():
    runner = ModelRunner.load(EngineConfig(model=model, dtype=dtype, num_blocks=8, threads=1))
    first = runner.logits([Chunk(list(range(40)), 0, [1, 2, 3], SamplingParams())])
    second = runner.logits([Chunk([7], 40, [1, 2, 3], SamplingParams())])
    backends.append(type(create_backend("auto", runner.layout, runner.device)).__name__)
    logits[dtype] = torch.cat((first, second)).float().tolist()
print(json.dumps([load() is None, backends, logits]))
"""
    answers = []
    for environment in ({"PATH": ""}, {"KVFERRY_NATIVE": "0"}, {}):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")} | environment if environment else os.environ,
            capture_output=True,
            text=True,
            check=True,
        )
        answers.append(json.loads(done.stdout))
    (absent, backends, logits), off, (_, _, native) = answers
    assert (absent, backends) == (True, ["SDPAttention"] * 2)
    assert off == answers[0]
    assert not (tmp_path / "cache").exists()
    for dtype, bound in bounds.items():
        found, expected = torch.tensor(native[dtype]), torch.tensor(logits[dtype])
        assert float((found - expected).abs().max() / expected.abs().max()) < bound


def test_asking_for_the_kernels_where_they_do_not_serve_is_refused() -> None:
    for dtype, head_dim in (("float16", 64), ("float32", 512)):
        layout = KVLayout(num_layers=1, kv_heads=1, head_dim=head_dim, block_size=16, dtype=dtype)
        with pytest.raises(ConfigError, match="native") as caught:
            create_backend("native", layout, CPU)
        assert caught.value.field == "attention"
    assert isinstance(fused_ops(torch.float16, CPU), TorchOps)


def compiler(folder: Path, script: str) -> Path:
    """A compiler that does as the script says; gives the file with a line for each time it was asked to compile."""
    made, asked = folder / "c++", folder / "asked"
    made.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\necho >> {asked}\n{script}\n')
    made.chmod(0o755)
    return asked


@pytest.mark.skipif(sys.platform != "linux", reason="built on Linux only")
def test_a_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # That the real one builds it is seen wherever the kernels run.
    asked = compiler(tmp_path, 'while [ "$1" != -o ]; do shift; done; echo made > "$2"')
    monkeypatch.setenv("PATH", str(tmp_path))
    first = build(tmp_path / "cache")
    assert first is not None
    assert first.read_text() == "made\n"
    assert build(tmp_path / "cache") == first
    assert len(asked.read_text().splitlines()) == 1
    assert {path.name for path in first.parent.iterdir()} == {first.name, "build.lock"}


@pytest.mark.skipif(sys.platform != "linux", reason="built on Linux only")
def test_a_compiler_that_refuses_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = compiler(tmp_path, "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build(tmp_path / "cache") is None
    assert len(asked.read_text().splitlines()) == 2  # with wide vectors, and without
    assert build(tmp_path / "cache") is None
    assert len(asked.read_text().splitlines()) == 2


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    assert build(blocked / "native") is None
