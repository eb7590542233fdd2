"""The model that ships with the project, through prefill, handoff and decode: transformers' own text."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from oracle import Oracle
from rack import rack

from cluster.model_store import DEFAULT_MODEL, resolve_model
from router.tokenizer import Tokenizer

LONG_VERSION = 50
"""Examples from which on the long version runs: so many prompts, and so many tokens of each as issue 4 asks for."""
BFLOAT16_TIE = 0.2
"""What it may take for the best, in deviations of the exact logits, of which transformers errs by 0.02 to 0.07."""
OPENINGS = (
    "The capital of {} is",
    "Write a short story about {}.\n\n",
    "Q: What is known about {}?\nA:",
    "def describe_{}(n):\n    ",
    "<|im_start|>user\nTell me about {}, in three sentences.<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, long before there was any {}, there lived",
    "1. {}\n2. gravity\n3.",
    "Dear Sir or Madam, I am writing to you about {} because",
)
SUBJECTS = (
    "France",
    "the sea",
    "prime numbers",
    "the year 1848",
    "bread",
    "quantum mechanics",
    "chess",
    "Ada Lovelace",
)


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_model(DEFAULT_MODEL)


def prompts(tokenizer: Tokenizer, count: int) -> list[tuple[int, ...]]:
    """Real text of every length up to a few hundred tokens, of which some begin alike, and some random tokens."""
    rng = random.Random(1)
    asked: list[tuple[int, ...]] = []
    for number in range(count):
        opening = OPENINGS[number % len(OPENINGS)].format(rng.choice(SUBJECTS))
        if number % 5 == 3:  # a long one, and its beginning is another's
            story = asked[-1] if number % 2 else ()
            opening += " ".join(f"And then there was {subject}." for subject in rng.choices(SUBJECTS, k=30))
            asked.append((*story, *tokenizer.encode(opening)))
        elif number % 10 == 9:
            asked.append(tuple(rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(1, 70))))
        else:
            asked.append(tokenizer.encode(opening))
    return asked


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("dtype", "tie"), [("float32", 0.0), ("bfloat16", BFLOAT16_TIE)])
async def test_greedy_text_is_that_of_transformers(
    model: Path, oracle: Oracle, equality_examples: int, dtype: str, tie: float
) -> None:
    whole = equality_examples >= LONG_VERSION
    asked = prompts(Tokenizer(model), LONG_VERSION if whole else 4)
    tokens = 200 if whole else 16
    engine = {"dtype": dtype, "block_size": 16, "num_blocks": 513, "max_batch_tokens": 96, "max_model_len": 1024}
    async with rack(model, engine=engine, router={"worker_timeout": 120.0}) as running:
        answers = await asyncio.gather(*(running.ask(prompt, max_tokens=tokens) for prompt in asked))
    assert all(len(answer.token_ids) == tokens for answer in answers)
    # Teacher-forced: each token is the best after those before it.
    departures = [
        oracle.departure(prompt, answer.token_ids, tie) for prompt, answer in zip(asked, answers, strict=True)
    ]
    assert {number: departure for number, departure in enumerate(departures) if departure} == {}
    if whole and dtype == "float32":
        # The same once more as a user of transformers gets it, token by token over its own cache.
        for prompt, answer in zip(asked, answers, strict=True):
            assert answer.token_ids == oracle.greedy(prompt, tokens)
