"""Whatever the lengths, chunks, layouts, batches and caches: the text is transformers' text."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from checkpoints import tiny_llama
from oracle import Oracle
from rack import Rack, rack

from protocol.layout import KVLayout

BLOCK = 4
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 30, 47)


def prompts(oracle: Oracle, lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, oracle.vocab_size) for _ in range(length)] for length in lengths]


def shipped(running: Rack) -> tuple[int, int]:
    loads = [worker.load() for worker in running.prefill]
    return sum(load.kv_blocks for load in loads), sum(load.kv_bytes for load in loads)


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"order": "HND", "max_batch_tokens": 5},
        {"block_size": 16, "max_batch_tokens": 512},
        {"block_size": 8, "max_batch_tokens": 8, "prefix_cache": False},
    ],
    ids=["nhd", "hnd-small-chunks", "one-chunk", "no-prefix-cache"],
)
async def test_greedy_text_at_every_length_and_chunking(
    tiny_llama_dir: Path, tiny_oracle: Oracle, engine: dict[str, object]
) -> None:
    async with rack(tiny_llama_dir, engine=engine) as running:
        for prompt in prompts(tiny_oracle, LENGTHS):
            answer = await running.ask(prompt)
            assert answer.token_ids == tiny_oracle.greedy(prompt, 12), f"prompt of {len(prompt)}"
            assert answer.finish_reason == "length"


async def test_what_crosses_is_the_arithmetic_of_the_layout(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    async with rack(tiny_llama_dir) as running:
        profile = running.prefill[0].profile
        assert profile is not None
        layout: KVLayout = profile.layout
        for prompt in prompts(tiny_oracle, LENGTHS, seed=1):
            before = shipped(running)
            answer = await running.ask(prompt)
            after = shipped(running)
            blocks = layout.blocks_for(len(prompt))
            assert answer.report is not None
            assert (after[0] - before[0], after[1] - before[1]) == (blocks, blocks * layout.block_bytes)
            assert (answer.report.kv_blocks, answer.report.kv_bytes) == (blocks, blocks * layout.block_bytes)
            assert answer.report.transport == "shm"
        landed = running.decode[0].load()
        assert (landed.kv_blocks, landed.kv_bytes) == shipped(running)


async def test_sixteen_streams_over_two_and_two(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    lengths = tuple(range(1, 33, 2))
    async with rack(tiny_llama_dir, prefill=2, decode=2, engine={"num_blocks": 257}) as running:
        asked = prompts(tiny_oracle, lengths, seed=2)
        answers = await asyncio.gather(*(running.ask(prompt, max_tokens=16) for prompt in asked))
        for prompt, answer in zip(asked, answers, strict=True):
            assert answer.token_ids == tiny_oracle.greedy(prompt, 16)
        # Both of each took part.
        assert all(worker.load().kv_blocks for worker in running.workers())


@pytest.mark.parametrize("length", [9, 12, 13, 30])
async def test_prefix_hits_on_either_leg_and_on_both(tiny_llama_dir: Path, tiny_oracle: Oracle, length: int) -> None:
    (prompt,) = prompts(tiny_oracle, (length,), seed=3)
    tail = prompts(tiny_oracle, (7,), seed=4)[0]
    async with rack(tiny_llama_dir) as running:
        cold = await running.ask(prompt)
        assert cold.report is not None
        assert cold.report.cached_tokens == 0
        # Wholly cached on both legs, then partly, and with 0, 1, n - 1 and n blocks in common.
        for asked in (prompt, prompt + tail, prompt[: BLOCK + 1] + tail, tail + prompt, prompt[:-1]):
            answer = await running.ask(asked)
            assert answer.token_ids == tiny_oracle.greedy(asked, 12)
        again = await running.ask(prompt)
        assert again.token_ids == cold.token_ids
        assert again.report is not None
        assert again.report.cached_tokens == (length - 1) // BLOCK * BLOCK
        assert again.report.kv_blocks == -(-length // BLOCK) - length // BLOCK
        # Another tenant's salt hits nothing, and gets the same text.
        other = await running.ask(prompt, salt="other")
        assert other.report is not None
        assert (other.report.cached_tokens, other.token_ids) == (0, cold.token_ids)


async def test_decode_alone_has_the_prefix(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    (prompt,) = prompts(tiny_oracle, (13,), seed=5)
    async with rack(tiny_llama_dir, engine={"prefix_cache": False}, decode_engine={"prefix_cache": True}) as running:
        for _ in range(2):
            answer = await running.ask(prompt)
            assert answer.token_ids == tiny_oracle.greedy(prompt, 12)
        assert answer.report is not None
        assert (answer.report.cached_tokens, answer.report.kv_blocks) == (0, 1)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_short_outputs(tiny_llama_dir: Path, tiny_oracle: Oracle, max_tokens: int) -> None:
    async with rack(tiny_llama_dir) as running:
        for prompt in prompts(tiny_oracle, (1, 8, 9), seed=6):
            answer = await running.ask(prompt, max_tokens=max_tokens)
            assert answer.token_ids == tiny_oracle.greedy(prompt, max_tokens)
            assert answer.finish_reason == "length"
        if max_tokens == 1:
            assert shipped(running) == (0, 0)


async def test_a_stop_token_first_later_and_never(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    (prompt,) = prompts(tiny_oracle, (10,), seed=7)
    truth = tiny_oracle.greedy(prompt, 12)
    async with rack(tiny_llama_dir) as running:
        for token_id in dict.fromkeys(truth):
            answer = await running.ask(prompt, stop_token_ids=(token_id,))
            assert answer.token_ids == truth[: truth.index(token_id) + 1]
            assert answer.finish_reason == "stop"
        unused = next(token_id for token_id in range(3, tiny_oracle.vocab_size) if token_id not in truth)
        assert (await running.ask(prompt, stop_token_ids=(unused,))).token_ids == truth


async def test_a_seed_gives_one_text_whatever_the_company(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    asked = prompts(tiny_oracle, (11, 5, 17, 23), seed=8)
    sampling = {"temperature": 1.1, "top_p": 0.95, "top_k": 40, "max_tokens": 16}
    async with rack(tiny_llama_dir, prefill=2, decode=2) as running:
        alone = [(await running.ask(prompt, seed=seed, **sampling)).token_ids for seed, prompt in enumerate(asked)]
        together = await asyncio.gather(
            *(running.ask(prompt, seed=seed, **sampling) for seed, prompt in enumerate(asked))
        )
        assert [answer.token_ids for answer in together] == alone
        other = await running.ask(asked[0], seed=99, **sampling)
        assert other.token_ids != alone[0]


@pytest.mark.parametrize(
    "family",
    [
        {"family": "gemma2", "head_dim": 16, "sliding_window": 7, "attn_logit_softcapping": 5.0},
        {"family": "mixtral", "num_local_experts": 4},
        {"family": "qwen3", "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
        {"family": "phi3", "sliding_window": 9},
    ],
    ids=lambda family: str(family["family"]),
)
async def test_other_families_cross_too(family: dict[str, object], tmp_path: Path) -> None:
    tiny_llama(tmp_path, **family)
    oracle = Oracle(tmp_path)
    async with rack(tmp_path, engine={"max_batch_tokens": 8}) as running:
        for prompt in prompts(oracle, (1, BLOCK, 2 * BLOCK + 1, 47)):
            answer = await running.ask(prompt)
            assert answer.token_ids == oracle.greedy(prompt, 12), f"prompt of {len(prompt)}"
