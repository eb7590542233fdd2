"""A model whose layers all have a sliding window: decode keeps what is read, and the text is transformers' text."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from checkpoints import tiny_llama
from oracle import Oracle
from rack import Rack, rack

from engine.models.config import ModelConfig

BLOCK, WINDOW = 4, 9
LONGEST = 50


async def most_active(running: Rack, asked: asyncio.Task[object]) -> int:
    most = 0
    while not asked.done():
        most = max(most, running.decode[0].pool.counts().active)
        await asyncio.sleep(0.001)
    return most


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
async def test_long_text_in_few_blocks(tmp_path: Path, attention: str) -> None:
    tiny_llama(tmp_path, family="mistral", sliding_window=WINDOW)
    oracle = Oracle(tmp_path)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, oracle.vocab_size) for _ in range(length)] for length in (1, 43)]
    async with rack(tmp_path, engine={"attention": attention, "max_batch_tokens": 8}) as running:
        for prompt in prompts:
            asked = asyncio.create_task(running.ask(prompt, max_tokens=LONGEST))
            most = await most_active(running, asked)
            assert (await asked).token_ids == oracle.greedy(prompt, LONGEST)
            # The window may begin and end inside of blocks, and one more is taken before the oldest is given back.
            assert most <= -(-WINDOW // BLOCK) + 2, "blocks that nobody reads were kept"
        # A hit on blocks that were given back while their sequence went on, and a text that goes on from another's.
        again = prompts[-1] + oracle.greedy(prompts[-1], LONGEST)[:37]
        answer = await running.ask(again, max_tokens=20)
        assert answer.token_ids == oracle.greedy(again, 20)


@pytest.mark.parametrize(
    ("settings", "reach"),
    [
        ({"family": "mistral", "sliding_window": 9}, 9),
        ({"family": "mistral"}, 0),
        ({"family": "gemma2", "head_dim": 16, "sliding_window": 7}, 0),
        ({"family": "qwen3", "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}, 0),
    ],
)
def test_a_layer_that_sees_everything_keeps_everything(tmp_path: Path, settings: dict[str, object], reach: int) -> None:
    tiny_llama(tmp_path, **settings)
    assert ModelConfig.read(tmp_path).reach == reach
