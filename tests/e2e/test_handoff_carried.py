"""The same text with KV by the optional libraries, each in carriers of its own."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from oracle import Oracle
from rack import rack

from kv_transfer.transport import why_unusable


@pytest.mark.parametrize("scheme", ["ucxx", "nixl"])
async def test_eight_streams(tiny_llama_dir: Path, tiny_oracle: Oracle, scheme: str) -> None:
    reason = why_unusable(scheme)
    if reason is not None:
        pytest.skip(reason)
    rng = random.Random(7)
    asked = [[rng.randrange(3, tiny_oracle.vocab_size) for _ in range(length)] for length in (1, 3, 4, 5, 8, 9, 30, 47)]
    async with rack(tiny_llama_dir, ship_by=scheme, listen_by=scheme, engine={"num_blocks": 129}) as running:
        answers = await asyncio.gather(*(running.ask(prompt) for prompt in asked))
        for prompt, answer in zip(asked, answers, strict=True):
            assert answer.token_ids == tiny_oracle.greedy(prompt, 12)
            assert answer.report is not None
            assert answer.report.transport == scheme
