"""Prefill and decode workers whose KV layouts differ: the same text, whatever lies between the two pools."""

from __future__ import annotations

import asyncio
import logging
import random
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_llama
from oracle import Oracle
from rack import Answer, Rack, rack
from test_handoff_text import prompts, shipped

from decode_worker.worker import DecodeWorker
from engine.batch import Chunk
from engine.kv_cache import TORCH_DTYPES
from engine.prefix_index import block_hashes
from prefill_worker.worker import PrefillWorker
from protocol.errors import NoWorkerAvailable
from protocol.layout import PADDING_BLOCK
from protocol.sampling import SamplingParams
from protocol.wire_layout import WireLayout


def lengths(*sizes: int) -> tuple[int, ...]:
    """One less than a block, a block, one more, and one more than two."""
    return tuple(sorted({length for size in sizes for length in (size - 1, size, size + 1, 2 * size + 1)}))


def wire_of(running: Rack, wire_dtype: str | None = None) -> WireLayout:
    profile = running.decode[0].profile
    assert profile is not None
    return WireLayout(profile.layout, wire_dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prefill", "decode", "transport"),
    [
        ({"block_size": 4}, {"block_size": 8}, "shm"),
        ({"block_size": 8}, {"block_size": 4}, "tcp"),
        ({"block_size": 6, "order": "HND"}, {"block_size": 4, "order": "NHD"}, "shm"),
        ({"order": "NHD"}, {"order": "HND"}, "tcp"),
        ({"block_size": 16, "max_batch_tokens": 32}, {"block_size": 4}, "inproc"),
        ({"block_size": 2, "max_batch_tokens": 10}, {"block_size": 16, "num_blocks": 20}, "shm"),
    ],
    ids=["4-to-8", "8-to-4", "6-hnd-to-4-nhd", "nhd-to-hnd", "16-to-4", "2-to-16"],
)
async def test_the_same_text(
    tiny_llama_dir: Path, tiny_oracle: Oracle, prefill: dict[str, object], decode: dict[str, object], transport: str
) -> None:
    by = {"ship_by": transport, "listen_by": transport}
    engine = {"num_blocks": 129, **prefill}
    async with rack(tiny_llama_dir, engine=engine, decode_engine={"num_blocks": 129, **decode}, **by) as running:  # type: ignore[arg-type]
        wire = wire_of(running)
        sizes = [int(str(each.get("block_size", 4))) for each in (prefill, decode)]
        for prompt in prompts(tiny_oracle, tuple(sorted({1, 37, *lengths(*sizes)}))):
            before = shipped(running)
            answer = await running.ask(prompt)
            assert answer.token_ids == tiny_oracle.greedy(prompt, 12), f"prompt of {len(prompt)}"
            assert answer.report is not None
            assert answer.report.transport == transport
            blocks = wire.layout.blocks_for(len(prompt))
            after = shipped(running)
            assert (after[0] - before[0], after[1] - before[1]) == (blocks, blocks * wire.block_bytes)
            assert (answer.report.kv_blocks, answer.report.kv_bytes) == (blocks, blocks * wire.block_bytes)


@pytest.mark.parametrize("sizes", [(4, 8), (8, 4)])
async def test_prefix_hits_on_either_leg(tiny_llama_dir: Path, tiny_oracle: Oracle, sizes: tuple[int, int]) -> None:
    prefill, decode = sizes
    (prompt,) = prompts(tiny_oracle, (29,), seed=3)
    tail = prompts(tiny_oracle, (7,), seed=4)[0]
    async with rack(
        tiny_llama_dir, engine={"block_size": prefill, "num_blocks": 129}, decode_engine={"block_size": decode}
    ) as running:
        for asked in (prompt, prompt + tail, prompt[: prefill + 1] + tail, prompt[: decode + 1] + tail, prompt[:-1]):
            answer = await running.ask(asked)
            assert answer.token_ids == tiny_oracle.greedy(asked, 12)
        again = await running.ask(prompt)
        assert again.token_ids == tiny_oracle.greedy(prompt, 12)
        assert again.report is not None
        assert again.report.cached_tokens == (len(prompt) - 1) // prefill * prefill
        assert again.report.kv_blocks == -(-len(prompt) // decode) - len(prompt) // decode
        assert running.decode[0].load().cached_tokens > 0


async def test_more_than_the_staging_memory_holds(
    tiny_llama_dir: Path, tiny_oracle: Oracle, caplog: pytest.LogCaptureFixture
) -> None:
    """Eight prompts at a time through memory for four blocks."""
    asked = prompts(tiny_oracle, (150, 3, 17, 65, 120, 8, 21, 44), seed=9)
    async with rack(
        tiny_llama_dir,
        engine={"num_blocks": 257, "max_batch_tokens": 64},
        decode_engine={"block_size": 32},
        prefill_transfer={"staging_bytes": 1 << 16},
    ) as running:
        with caplog.at_level(logging.INFO, "prefill_worker.shipping"):
            answers = await asyncio.gather(*(running.ask(prompt) for prompt in asked))
        for prompt, answer in zip(asked, answers, strict=True):
            assert answer.token_ids == tiny_oracle.greedy(prompt, 12)
        assert wire_of(running).block_bytes == (1 << 16) // 4
        assert shipped(running) == (18, 18 << 14)
        (told,) = [record.message for record in caplog.records]
        assert "block_size: 4 here, 32 there" in told


@pytest.mark.parametrize("wire_dtype", [None, "float8_e4m3"])
async def test_cancels_on_the_way_leave_nothing(
    tiny_llama_dir: Path, tiny_oracle: Oracle, wire_dtype: str | None
) -> None:
    """A third of the clients leave, each at another moment; the rack checks that every pool is at its baseline."""
    rng = random.Random(11)
    asked = prompts(tiny_oracle, tuple(rng.randint(1, 90) for _ in range(24)), seed=11)
    async with rack(
        tiny_llama_dir,
        engine={"num_blocks": 129, "prefix_cache": False},
        decode_engine={"block_size": 8},
        prefill_transfer={"staging_bytes": 1 << 16},
        decode_transfer={"wire_dtype": wire_dtype},
    ) as running:
        tasks = [asyncio.create_task(running.ask(prompt, max_tokens=6)) for prompt in asked]
        for task in rng.sample(tasks, 8):
            for _ in range(rng.randrange(60)):
                await asyncio.sleep(0)
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        stayed = [(prompt, answer) for prompt, answer in zip(asked, answers, strict=True) if isinstance(answer, Answer)]
        assert len(stayed) >= 16
        for prompt, answer in stayed:
            assert len(answer.token_ids) == 6
            assert wire_dtype is not None or answer.token_ids == tiny_oracle.greedy(prompt, 6)
        await running.settle()
        staging = running.prefill[0]._exports._shipping._staging
        assert staging is not None
        assert staging._room.used == 0


@pytest.mark.parametrize(
    ("prefill", "decode", "wire_dtype"),
    [
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, None),
        ({"dtype": "bfloat16", "block_size": 8}, {"dtype": "float32", "order": "HND"}, None),
        ({}, {}, "bfloat16"),
        ({}, {}, "float8_e4m3"),
        ({"block_size": 8, "dtype": "bfloat16"}, {"dtype": "bfloat16"}, "float8_e4m3"),
        ({"block_size": 4}, {"block_size": 16, "order": "HND"}, "float8_e4m3"),
    ],
    ids=["32-to-16", "16-to-32", "32-by-16", "32-by-8", "16-by-8", "4-to-16-by-8"],
)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_kv_arrives_as_near_as_its_types_allow(
    tiny_llama_dir: Path,
    tiny_oracle: Oracle,
    prefill: dict[str, object],
    decode: dict[str, object],
    wire_dtype: str | None,
    transport: str,
) -> None:
    """The pools are compared; the texts would tell little, for each side computes in its own dtype."""
    (prompt,) = prompts(tiny_oracle, (37,), seed=5)
    by = {"ship_by": transport, "listen_by": transport}
    limits = {"wire_dtype": wire_dtype}
    async with rack(tiny_llama_dir, engine=prefill, decode_engine=decode, decode_transfer=limits, **by) as running:  # type: ignore[arg-type]
        answer = await running.ask(prompt, max_tokens=2)
        assert answer.report is not None
        wire = wire_of(running, wire_dtype)
        blocks = wire.layout.blocks_for(len(prompt))
        assert (answer.report.kv_blocks, answer.report.kv_bytes) == (blocks, blocks * wire.block_bytes)
        if wire_dtype == "float8_e4m3":
            assert answer.report.kv_bytes / (blocks * wire.layout.block_bytes) < 1.1 / wire.layout.itemsize
        await running.settle()
        there, here = (kv_of(worker, prompt) for worker in (running.prefill[0], running.decode[0]))
        tokens = min(len(there), len(here))
        assert tokens >= 32
        exact = there[:tokens].to(TORCH_DTYPES[wire.element]) if not wire.scaled else there[:tokens]
        exact = exact.to(here.dtype).float()
        if wire.scaled:
            # A head of a block shares one scale, and rounds to one part in sixteen.
            largest = exact.abs().max()
            assert (here[:tokens].float() - exact).abs().le(exact.abs() / 15 + largest / 448 / 500).all()
        else:
            assert torch.equal(here[:tokens].float(), exact)


def kv_of(worker: PrefillWorker | DecodeWorker, prompt: list[int]) -> torch.Tensor:
    """``[tokens, layers, 2, heads, dim]`` of the prompt's full blocks, from the worker's prefix cache."""
    profile = worker.profile
    assert profile is not None
    layout = profile.layout
    table = worker.pool.match(block_hashes(prompt, layout.block_size, b""))
    pool = worker._stepper.runner.cache.tensor[list(table)]
    if layout.order == "HND":
        pool = pool.transpose(3, 4)
    return pool.permute(0, 3, 1, 2, 4, 5).flatten(0, 1)


@pytest.mark.parametrize(("wire_dtype", "bound"), [(None, 1e-4), ("bfloat16", 0.05), ("float8_e4m3", 0.5)])
async def test_logits_over_imported_kv(
    tiny_llama_dir: Path, tiny_oracle: Oracle, wire_dtype: str | None, bound: float
) -> None:
    """Teacher-forced: the next token's logits over what decode has imported, against transformers' own."""
    (prompt,) = prompts(tiny_oracle, (37,), seed=6)
    limits = {"wire_dtype": wire_dtype}
    async with rack(
        tiny_llama_dir, engine={"block_size": 8}, decode_engine={"block_size": 4}, decode_transfer=limits
    ) as running:
        await running.ask(prompt, max_tokens=2)
        await running.settle()
        worker = running.decode[0]
        table = worker.pool.match(block_hashes(prompt, 4, b""))
        known = 4 * len(table)
        assert known == 36
        # The token itself is stored in the padding block.
        chunk = Chunk(prompt[known:], known, [*table, PADDING_BLOCK], SamplingParams(temperature=0.0))
        (logits,) = worker._stepper.runner.logits([chunk])
        with torch.inference_mode():
            truth = tiny_oracle.model(torch.tensor([prompt])).logits[0, -1]
        assert (logits - truth).abs().max() <= bound * truth.std()
        assert (wire_dtype is None) or (logits != truth).any()


async def test_another_geometry_is_refused_at_the_door(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Same name, same vocabulary, other heads: the router pairs no such workers, and says why."""
    other = tiny_llama(tmp_path / "other", num_key_value_heads=4)
    async with rack(tiny_llama_dir, decode_model=other) as running:
        with pytest.raises(NoWorkerAvailable, match=r"decode-0 \(there\): kv_heads: \d here, 4 there"):
            await running.ask([1, 2, 3])
