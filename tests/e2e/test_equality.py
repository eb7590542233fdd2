"""Whatever the model, the layouts, the caches, the company and who leaves: the text is transformers' text."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tiny_llama
from family_cases import FAMILIES, case
from hypothesis import event, given, settings
from hypothesis import strategies as st
from oracle import Oracle
from rack import Rack, rack

from decode_worker.speculation import Speculation
from kv_transfer.ucx import describe
from protocol.sampling import SamplingParams
from router.front.generation import Generation

IN_SHORT = ("gemma2", "llama", "mistral")
"""Families of the short version: windows that alternate, none, and one for all. Others differ from them in the model
alone, which ``tests/engine`` holds against transformers."""
LONG_VERSION = 50
"""Examples from which on the slow transports are among what is drawn."""
MAX_LEN = 96
MOST_TOKENS = 12
"""Tokens of an answer at most; with the longest prompt they are within MAX_LEN."""
TIE = 1e-4
"""Logits so near each other, in standard deviations, are equal within float32's rounding."""


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        hit: how much it has in common with what was asked before: 0, 1, n - 1 or n blocks.
        by_decode: whether the blocks are those of the decode side.
        tail: tokens of its own after these.
        max_tokens: as named.
        copies: how often it is asked at once, as ``n`` does.
        leaves_after: tokens after which the client leaves; None stays.
        seed: of its tokens.
    """

    hit: str
    by_decode: bool
    tail: int
    max_tokens: int
    copies: int
    leaves_after: int | None
    seed: int

    def prompt(self, base: list[int], sizes: tuple[int, int], vocab_size: int) -> list[int]:
        block = sizes[self.by_decode]
        blocks = len(base) // block
        common = base[: {"0": 0, "1": 1, "n - 1": max(0, blocks - 1), "n": blocks}[self.hit] * block]
        rng = random.Random(self.seed)
        found = common + [rng.randrange(3, vocab_size) for _ in range(self.tail)]
        return found or base[:1]


ASKS = st.builds(
    Ask,
    hit=st.sampled_from(["0", "1", "n - 1", "n"]),
    by_decode=st.booleans(),
    tail=st.sampled_from([0, 0, 1, 2, 7, 20]),
    max_tokens=st.sampled_from([1, 2, 7, MOST_TOKENS, MOST_TOKENS]),
    copies=st.sampled_from([1, 1, 1, 2, 3]),
    leaves_after=st.sampled_from([None, None, None, 0, 1, 3]),
    seed=st.integers(0, 1 << 16),
)


@dataclass(frozen=True)
class Side:
    """The engine of the workers of one role.

    Attributes:
        workers: how many there are.
        block_size, order, max_batch_tokens, prefix_cache: as in EngineConfig.
        tight: whether the pool holds little more than one sequence.
    """

    workers: int
    block_size: int
    order: str
    max_batch_tokens: int
    prefix_cache: bool
    tight: bool

    def engine(self) -> dict[str, object]:
        tokens = MAX_LEN * (5 if self.tight else 32) // 4
        return {
            "block_size": self.block_size,
            "order": self.order,
            "max_batch_tokens": self.max_batch_tokens,
            "prefix_cache": self.prefix_cache,
            "num_blocks": 3 - -tokens // self.block_size,
            "max_model_len": MAX_LEN,
        }


SIDES = st.builds(
    Side,
    workers=st.sampled_from([1, 1, 2]),
    block_size=st.sampled_from([1, 2, 4, 6, 8, 16]),
    order=st.sampled_from(["NHD", "HND"]),
    max_batch_tokens=st.sampled_from([3, 8, 16, 64]),
    prefix_cache=st.sampled_from([True, True, False]),
    tight=st.booleans(),
)


class Models:
    """Random-weight models with what transformers says of them, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[str, int], tuple[Path, Oracle]] = {}

    def of(self, family: str, choice: int) -> tuple[Path, Oracle]:
        key = family, choice
        if key not in self._made:
            heads = ((4, 2), (6, 2), (5, 1), (4, 4))[choice % 4]
            path = tiny_llama(self._folder / f"{family}-{choice}", seed=choice, **case(family, heads, 16, choice))
            self._made[key] = path, Oracle(path)
        return self._made[key]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("equality"))


async def client(running: Rack, prompt: list[int], ask: Ask) -> list[int]:
    """The tokens that one client saw before it left or the end came."""
    seen: list[int] = []

    async def read() -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=ask.max_tokens)
        async with aclosing(running.service.generate(Generation(tuple(prompt), sampling))) as stream:
            async for output in stream:
                seen.extend(output.token_ids)
                if ask.leaves_after is not None and len(seen) >= ask.leaves_after:
                    return

    task = asyncio.create_task(read())
    if ask.leaves_after == 0:
        for _ in range(ask.seed % 97):
            await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
    return seen


async def serve(path: Path, settings: dict[str, Any], warm: list[Any], asked: list[Any]) -> tuple[list[list[int]], int]:
    """What each of ``asked`` got, all at once, after those of ``warm`` one by one; and how many were preempted."""
    async with rack(path, router={"worker_timeout": 60.0}, **settings) as running:
        for prompt, ask in warm:
            await client(running, prompt, ask)
        answers = await asyncio.gather(*(client(running, prompt, ask) for prompt, ask in asked))
        return answers, sum(worker.load().preemptions for worker in running.decode)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_that_of_transformers(family: str, models: Models, equality_examples: int) -> None:
    if equality_examples < LONG_VERSION and family not in IN_SHORT:
        pytest.skip("the long version has every family")
    transports = ["auto", "tcp", "shm", "inproc"]
    if equality_examples >= LONG_VERSION and describe().usable:
        transports.append("ucx")

    # The first case that hypothesis tries is the least of all.
    @settings(max_examples=1 + equality_examples // 3, deadline=None)
    @given(
        choice=st.sampled_from([1, 3, 5, 7, 9, 11, 0, 2, 4]),
        prefill=SIDES,
        decode=SIDES,
        transport=st.sampled_from(transports),
        transfer=st.fixed_dictionaries({"transfer_checksum": st.booleans()}),
        layers=st.integers(1, 3),
        length=st.integers(1, 48),
        warm=st.lists(ASKS, max_size=2),
        asks=st.lists(ASKS, min_size=2, max_size=6),
        guess=st.sampled_from([None, Speculation(min_match=1), Speculation(tokens=7, min_match=1)]),
        seed=st.integers(0, 1 << 16),
    )
    def explore(
        choice: int,
        prefill: Side,
        decode: Side,
        transport: str,
        transfer: dict[str, object],
        layers: int,
        length: int,
        warm: list[Ask],
        asks: list[Ask],
        guess: Speculation | None,
        seed: int,
    ) -> None:
        path, oracle = models.of(family, choice)
        rng = random.Random(seed)
        base = [rng.randrange(3, oracle.vocab_size) for _ in range(length)]
        sizes = prefill.block_size, decode.block_size
        before = [(ask.prompt(base, sizes, oracle.vocab_size), ask) for ask in warm]
        asked = [(ask.prompt(base, sizes, oracle.vocab_size), ask) for ask in asks for _ in range(ask.copies)]
        truths = [oracle.greedy(prompt, MOST_TOKENS) for prompt, _ in asked]
        racked = {
            "prefill": prefill.workers,
            "decode": decode.workers,
            "engine": prefill.engine(),
            "decode_engine": decode.engine(),
            "transfer": transfer,
            "prefill_transfer": {"layers_per_ship": layers},
            "decode_transfer": {"speculation": guess},
            "ship_by": transport,
            "listen_by": transport,
        }
        answers, preempted = asyncio.run(serve(path, racked, before, asked))
        event(f"preempted: {preempted > 0}")
        event(f"transport: {transport}")
        for (prompt, ask), answer, truth in zip(asked, answers, truths, strict=True):
            if ask.leaves_after is None:
                assert len(answer) == ask.max_tokens
            if answer != truth[: len(answer)]:
                assert oracle.departure(prompt, answer, TIE) is None

    explore()
