"""Two hundred streams in foul weather: each gets its text, or is told that no worker was left, and nothing leaks.

``pytest tests/chaos/test_stream_soak.py --fault-points 200 -s`` is the long version.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from crew import crew
from oracle import Oracle
from storm import storm
from tokenizers import Tokenizer

pytestmark = pytest.mark.timeout(3600)

STREAMS = 200
TOKENS = 24
SCHEMES = ("shm", "tcp")
"""By the seed's parity: a run takes one of them."""


async def test_streams_while_workers_die_and_links_are_cut(
    tiny_llama_dir: Path, tmp_path: Path, fault_seed: int, fault_points: int
) -> None:
    scheme = SCHEMES[fault_seed % len(SCHEMES)]
    oracle, rng = Oracle(tiny_llama_dir), random.Random(f"{fault_seed} streams")
    tokenizer = Tokenizer.from_file(str(tiny_llama_dir / "tokenizer.json"))
    prompts = [
        tuple(rng.randrange(3, oracle.vocab_size) for _ in range(length)) for length in (1, 15, 16, 60, 130, 300)
    ]
    async with crew("hireling", tmp_path) as hands, storm(hands, tiny_llama_dir, scheme) as weather:
        scripts = [weather.greedy(prompt, oracle.greedy(prompt, TOKENS), tokenizer) for prompt in prompts]
        scripts += [weather.greedy(prompt, oracle.greedy(prompt, 1), tokenizer) for prompt in prompts[:2]]
        scripts += [await weather.seeded(prompt, TOKENS, seed) for seed, prompt in enumerate(prompts)]
        await weather.run(rng, scripts, STREAMS, fault_points)
    print(
        f"\n{scheme}: streams {dict(weather.ended)}, the longest {weather.longest:.2f} s; faults {dict(weather.struck)}"
    )
