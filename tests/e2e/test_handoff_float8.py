"""KV caches in eight-bit floats: what crosses is half, and the text is that of one process with the same cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_llama
from oracle import Oracle
from rack import rack
from safetensors.torch import load_file, save_file
from test_handoff_layouts import kv_of, wire_of
from test_handoff_text import prompts, shipped

from engine.batch import Chunk
from engine.config import EngineConfig
from engine.float8 import narrowed
from engine.kv_cache import TORCH_DTYPES
from engine.runner import ModelRunner
from protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
SCALES = (0.02, 0.05, 0.03, 0.01)


@pytest.fixture(scope="module")
def scaled_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that brings scales for its KV cache."""
    path = tiny_llama(tmp_path_factory.mktemp("scaled"))
    tensors = load_file(path / "model.safetensors")
    for index, scale in enumerate(SCALES):
        tensors[f"model.layers.{index // 2}.self_attn.{'kv'[index % 2]}_scale"] = torch.tensor(scale)
    save_file(tensors, path / "model.safetensors")
    return path


@cache
def alone(path: Path, dtype: str, order: str) -> ModelRunner:
    return ModelRunner.load(
        EngineConfig(
            model=str(path),
            dtype="float32",
            kv_cache_dtype=dtype,  # type: ignore[arg-type]
            order=order,  # type: ignore[arg-type]
            block_size=4,
            num_blocks=65,
            threads=1,
        )
    )


def greedy(runner: ModelRunner, prompt: Sequence[int], count: int) -> list[int]:
    """What one process gives that never disaggregates, with the rack's chunks."""
    table = list(range(1, runner.layout.blocks_for(len(prompt) + count) + 1))
    text: list[int] = []
    for start in range(0, len(prompt), 16):
        piece = prompt[start : start + 16]
        draws = runner.execute([Chunk(piece, start, table, GREEDY)])
    while True:
        (draw,) = draws
        assert draw is not None
        text.append(draw.token_id)
        if len(text) == count:
            return text
        draws = runner.execute([Chunk(text[-1:], len(prompt) + len(text) - 1, table, GREEDY)])


@pytest.mark.parametrize(
    ("dtype", "order", "transport"),
    [
        ("float8_e4m3", "NHD", "shm"),
        ("float8_e4m3", "HND", "tcp"),
        ("float8_e5m2", "HND", "shm"),
        ("float8_e5m2", "NHD", "tcp"),
    ],
)
async def test_the_text_of_one_process_and_half_the_bytes(
    scaled_dir: Path, tiny_oracle: Oracle, dtype: str, order: str, transport: str
) -> None:
    by = {"ship_by": transport, "listen_by": transport}
    engine = {"kv_cache_dtype": dtype, "order": order}
    runner = alone(scaled_dir, dtype, order)
    (long,) = prompts(tiny_oracle, (41,), seed=5)
    async with rack(scaled_dir, engine=engine, **by) as running:  # type: ignore[arg-type]
        layout = wire_of(running).layout
        assert layout == runner.layout
        assert len(layout.scales) == 4
        # Cold, then hits on both legs: of all of it, of a part and of all but what is drawn from.
        for prompt in (*prompts(tiny_oracle, (1, 4, 17)), long, long, long[:22] + long[:9], long[:-1]):
            before = shipped(running)
            answer = await running.ask(prompt)
            assert answer.token_ids == greedy(runner, prompt, 12), f"prompt of {len(prompt)}"
            assert answer.report is not None
            blocks, nbytes = (after - then for after, then in zip(shipped(running), before, strict=True))
            # Of two layers K and V, two heads of sixteen elements for each of four tokens: an octet each.
            assert nbytes == blocks * 2 * 2 * 2 * 16 * 4
            assert answer.report.transport == (transport if blocks else "")
        assert running.decode[0].load().cached_tokens > 0
        assert running.prefill[0].load().cached_tokens > 0
        assert running.prefill[0]._exports._shipping._staging is None, "blocks go straight from pool to pool"


def test_the_text_is_not_that_of_the_wide_cache_alone(scaled_dir: Path, tiny_oracle: Oracle) -> None:
    """Else the test above would say nothing of which cache it was."""
    asked = prompts(tiny_oracle, (17, 23, 41, 30), seed=5)
    narrow = [greedy(alone(scaled_dir, "float8_e5m2", "NHD"), prompt, 12) for prompt in asked]
    assert narrow != [tiny_oracle.greedy(prompt, 12) for prompt in asked]


@pytest.mark.parametrize(
    ("prefill", "decode", "wire_dtype"),
    [
        ({}, {"kv_cache_dtype": "float8_e4m3"}, None),
        ({"kv_cache_dtype": "float8_e4m3", "block_size": 8}, {"order": "HND"}, None),
        ({"kv_cache_dtype": "float8_e4m3"}, {"kv_cache_dtype": "float8_e5m2", "block_size": 8}, None),
        ({"kv_cache_dtype": "float8_e4m3"}, {"kv_cache_dtype": "float8_e4m3", "block_size": 8, "order": "HND"}, None),
        ({"dtype": "bfloat16"}, {"kv_cache_dtype": "float8_e4m3"}, "bfloat16"),
        ({"kv_cache_dtype": "float8_e5m2"}, {}, "bfloat16"),
    ],
    ids=["32-to-e4m3", "e4m3-to-32", "e4m3-to-e5m2", "e4m3-to-e4m3", "16-to-e4m3-by-16", "e5m2-to-32-by-16"],
)
async def test_kv_arrives_as_near_as_its_types_allow(
    scaled_dir: Path,
    tiny_oracle: Oracle,
    prefill: dict[str, object],
    decode: dict[str, object],
    wire_dtype: str | None,
) -> None:
    (prompt,) = prompts(tiny_oracle, (37,), seed=5)
    # What one end's engine has is not the other's.
    blank = {"kv_cache_dtype": "auto", "dtype": "float32", "block_size": 4, "order": "NHD"}
    async with rack(
        scaled_dir, engine=blank | prefill, decode_engine=blank | decode, decode_transfer={"wire_dtype": wire_dtype}
    ) as running:
        assert len((await running.ask(prompt)).token_ids) == 12
        await running.settle()
        sender, reader = running.prefill[0], running.decode[0]
        assert sender.profile is not None
        assert reader.profile is not None
        source, target = sender.profile.layout, reader.profile.layout
        there, here = kv_of(sender, prompt), kv_of(reader, prompt)
        tokens = min(len(there), len(here))
        assert tokens >= 32
        layers = torch.tensor(SCALES).view(1, 2, 2, 1, 1)
        exact = there[:tokens].float() * (layers if source.scales else 1.0)
        if wire_dtype is not None:
            exact = exact.to(TORCH_DTYPES[wire_dtype]).float()  # type: ignore[index]
        if target.scales:
            wanted = narrowed(exact, TORCH_DTYPES[target.dtype], layers)
            assert torch.equal(here[:tokens].view(torch.uint8), wanted.view(torch.uint8))
        else:
            assert torch.equal(here[:tokens].float(), exact)


async def test_ends_whose_scales_differ_convert(
    scaled_dir: Path, tiny_llama_dir: Path, tiny_oracle: Oracle, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint with scales at prefill, the same weights without at decode."""
    (prompt,) = prompts(tiny_oracle, (37,), seed=5)
    async with rack(
        scaled_dir, decode_model=tiny_llama_dir, engine={"kv_cache_dtype": "float8_e4m3"}, ship_by="tcp"
    ) as running:
        caplog.set_level("INFO", "prefill_worker.shipping")
        assert len((await running.ask(prompt)).token_ids) == 12
        await running.settle()
        there, here = kv_of(running.prefill[0], prompt), kv_of(running.decode[0], prompt)
        exact = there.float() * torch.tensor(SCALES).view(1, 2, 2, 1, 1)
        assert torch.equal(here.float(), narrowed(exact, torch.float8_e4m3fn, 1.0).float())
        assert "scales: 0.02 for K of layer 0 here, 1 there" in caplog.text


async def test_a_pool_of_the_same_memory_takes_twice_the_requests(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    rng = random.Random(3)
    asked = [[rng.randrange(tiny_oracle.vocab_size) for _ in range(60)] for _ in range(2)]
    pools = []
    for dtype, num_blocks in (("auto", 21), ("float8_e4m3", 42)):
        engine = {"dtype": "bfloat16", "kv_cache_dtype": dtype, "num_blocks": num_blocks, "block_size": 4}
        async with rack(tiny_llama_dir, engine=engine) as running:
            for prompt in asked:
                await running.ask(prompt, max_tokens=2)
            await running.settle()
            worker = running.decode[0]
            pools.append((worker._stepper.runner.cache.nbytes, worker.pool.counts().cached))
    (wide_bytes, wide_cached), (bytes_, cached) = pools
    assert bytes_ == wide_bytes
    # Of 15 full blocks each both prompts stay, where much of the first had to go.
    assert cached == 2 * 15
    assert wide_cached <= 20
