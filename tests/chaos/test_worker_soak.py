"""A worker killed or stopped at a random moment of its handoffs: every text is right, and no survivor leaks a block.

``pytest tests/chaos/test_worker_soak.py --fault-points 600 -s`` is the long version: a third of the points each.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from checkpoints import tiny_llama
from crew import crew
from fleet import Request, fleet
from oracle import Oracle
from ucx_here import need_ucx

pytestmark = pytest.mark.timeout(3600)

TOKENS = 24


@pytest.fixture(scope="module")
def wide_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with 8 KiB of KV for each token: a handoff takes as long as a step or two."""
    return tiny_llama(tmp_path_factory.mktemp("wide") / "llama", num_key_value_heads=4, head_dim=128)


@pytest.fixture(scope="module")
def answers(wide_llama: Path) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    oracle, rng = Oracle(wide_llama), random.Random(5)
    prompts = [[rng.randrange(3, oracle.vocab_size) for _ in range(length)] for length in (1, 15, 64, 130, 257, 400)]
    return [(tuple(prompt), tuple(oracle.greedy(prompt, TOKENS))) for prompt in prompts]


@pytest.mark.parametrize("scheme", ["shm", "tcp", pytest.param("ucx", marks=pytest.mark.ucx)])
async def test_a_worker_that_is_killed_or_stopped_anywhere(
    scheme: str,
    wide_llama: Path,
    answers: list[tuple[tuple[int, ...], tuple[int, ...]]],
    tmp_path: Path,
    fault_seed: int,
    fault_points: int,
) -> None:
    if scheme == "ucx":
        need_ucx()

    def draw(rng: random.Random) -> list[Request]:
        chosen = [rng.choice(answers) for _ in range(rng.randint(2, 6))]
        return [
            Request(
                prompt,
                truth[: rng.randint(2, TOKENS)],
                f"{rng.random()}" if rng.random() < 0.7 else "",
                choices=rng.choice((1, 1, 3)),
            )
            for prompt, truth in chosen
        ]

    async with crew("hireling", tmp_path) as hands, fleet(hands, wide_llama, scheme) as ships:
        await ships.answer([Request(prompt, truth, "") for prompt, truth in answers])
        began = time.monotonic()
        await ships.answer([Request(prompt, truth, "again") for prompt, truth in answers])
        round_seconds = time.monotonic() - began
        for number in range(max(2, fault_points // 3)):
            rng = random.Random(f"{fault_seed} {scheme} workers {number}")
            try:
                await ships.strike(rng, draw(rng), round_seconds, number)
            except BaseException as error:
                error.add_note(f"{scheme}, point {number} of --fault-seed {fault_seed}")
                raise
    print(f"\n{scheme}: requests by attempts {dict(ships.retried)}, held {ships.held}")
    for what, seconds in sorted(ships.settled.items()):
        ordered = sorted(seconds)
        print(f"  {what}: {len(ordered)}, settled p50 {ordered[len(ordered) // 2]:.2f} s, max {ordered[-1]:.2f} s")
