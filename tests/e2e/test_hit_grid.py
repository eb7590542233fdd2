"""Chunk size x block size x what is cached where: the same text, and what crosses is exactly what decode lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle import Oracle
from rack import rack
from test_handoff_faults import prompt_of

FULL = 3
"""Full blocks of the prompt; a partial one follows."""
TOKENS = 4


@pytest.mark.parametrize("where", ["decode", "prefill", "both"])
@pytest.mark.parametrize("block", [1, 4, 8])
@pytest.mark.parametrize("chunk", [3, 64])
async def test_hits_of_every_length_on_either_leg(
    tiny_llama_dir: Path, tiny_oracle: Oracle, chunk: int, block: int, where: str
) -> None:
    engine = {"block_size": block, "max_batch_tokens": chunk, "num_blocks": 513, "max_model_len": 256}
    async with rack(
        tiny_llama_dir,
        engine={**engine, "prefix_cache": where != "decode"},
        decode_engine={**engine, "prefix_cache": where != "prefill"},
    ) as running:
        for tail in sorted({0, block // 2}):
            # Without a tail, n blocks are the whole prompt: the last token is computed all the same.
            prompt = prompt_of(tiny_oracle, FULL * block + tail, block)
            truth = tiny_oracle.greedy(prompt, TOKENS)
            for hit in range(FULL + 1):
                salt = f"{tail} {hit}"
                if hit:
                    # One token, so that decode keeps no block of its own making.
                    await running.ask(prompt[: hit * block], salt=salt, max_tokens=2)
                answer = await running.ask(prompt, salt=salt, max_tokens=TOKENS)
                assert answer.token_ids == truth, f"{hit} blocks cached"
                assert answer.report is not None
                lacking = -(-len(prompt) // block) - (hit if where != "prefill" else 0)
                reusable = min(hit, (len(prompt) - 1) // block) if where != "decode" else 0
                assert (answer.report.kv_blocks, answer.report.cached_tokens) == (lacking, reusable * block)


@pytest.mark.parametrize("block", [4, 8])
async def test_lengths_around_a_block_cold_partly_and_wholly_cached(
    tiny_llama_dir: Path, tiny_oracle: Oracle, block: int
) -> None:
    async with rack(tiny_llama_dir, engine={"block_size": block, "num_blocks": 129}) as running:
        for length in (1, block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1):
            prompt = prompt_of(tiny_oracle, length, length)
            truth = tiny_oracle.greedy(prompt, TOKENS)
            for salt, warm in (("cold", 0), ("partly", length // 2), ("wholly", length)):
                if warm:
                    await running.ask(prompt[:warm], salt=f"{length} {salt}", max_tokens=TOKENS)
                answer = await running.ask(prompt, salt=f"{length} {salt}", max_tokens=TOKENS)
                assert answer.token_ids == truth, f"{length} tokens, {salt}"
