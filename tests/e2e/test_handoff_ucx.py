"""The same text with KV over UCX."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from oracle import Oracle
from rack import rack

from kv_transfer.ucx import describe


@pytest.mark.ucx
async def test_eight_streams_over_ucx(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    found = await asyncio.to_thread(describe)
    if not found.usable:
        pytest.skip(found.reason)
    rng = random.Random(7)
    asked = [[rng.randrange(3, tiny_oracle.vocab_size) for _ in range(length)] for length in (1, 3, 4, 5, 8, 9, 30, 47)]
    async with rack(tiny_llama_dir, ship_by="ucx", listen_by="ucx", engine={"num_blocks": 129}) as running:
        answers = await asyncio.gather(*(running.ask(prompt) for prompt in asked))
        for prompt, answer in zip(asked, answers, strict=True):
            assert answer.token_ids == tiny_oracle.greedy(prompt, 12)
            assert answer.report is not None
            assert answer.report.transport == "ucx"
