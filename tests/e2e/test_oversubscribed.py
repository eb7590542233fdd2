"""Ten times what the pools hold, of every priority, and clients that leave at random: by either way to make room."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from oracle import Oracle
from rack import Rack, rack, until

from engine.swap_space import SwapSpace
from protocol.errors import EngineFailure
from protocol.sampling import SamplingParams
from router.front.generation import Generation

CLIENTS = 26
MAX_TOKENS = 18
POOL = 19
"""Blocks of 4 tokens, one of them padding: two or three requests fill it."""


@dataclass
class Crowd:
    """What every client has got, all together."""

    received: int = 0
    finished: list[int] = field(default_factory=list)

    async def client(self, running: Rack, generation: Generation, truth: list[int]) -> None:
        seen: list[int] = []
        async for output in running.service.generate(generation):
            seen += output.token_ids
            self.received += len(output.token_ids)
            assert seen == truth[: len(seen)]
        assert seen == truth

    async def leaving(self, task: asyncio.Task[None], at: int) -> None:
        """Leave once all clients together have got so many tokens: queued, in the hand-over, running or swapped out."""
        await until(lambda: self.received >= at or task.done(), f"{at} tokens", 120.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def breaks_now_and_then(space: SwapSpace) -> None:
    """Half of the copies fail, as on a device that has no memory left for a moment."""
    for name in ("save", "restore"):
        copy, calls = getattr(space, name), itertools.count()

        def broken(
            sources: Sequence[int],
            targets: Sequence[int],
            copy: Callable[..., None] = copy,
            calls: Iterator[int] = calls,
        ) -> None:
            if next(calls) % 2:
                raise EngineFailure("the copy failed")
            copy(sources, targets)

        setattr(space, name, broken)


@pytest.mark.parametrize(
    ("preemption", "breaks"), [("swap", False), ("swap", True), ("recompute", False), ("auto", False)]
)
async def test_ten_times_the_pool_of_every_priority_and_a_third_of_the_clients_leave(
    tiny_llama_dir: Path, tiny_oracle: Oracle, preemption: str, breaks: bool
) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(3, tiny_oracle.vocab_size) for _ in range(rng.randrange(1, 20))] for _ in range(CLIENTS)]
    # Before the cluster is up: transformers would hold its event loop.
    truths = [tiny_oracle.greedy(prompt, MAX_TOKENS) for prompt in prompts]
    async with rack(
        tiny_llama_dir,
        engine={"num_blocks": POOL, "max_model_len": 64, "max_sequences": 16},
        decode_transfer={"preemption": preemption, "swap_bytes": 1 << 20},
    ) as running:
        for index in range(0, CLIENTS, 8):
            sampling = {"temperature": 0.8, "seed": index, "max_tokens": MAX_TOKENS}
            truths[index] = (await running.ask(prompts[index], **sampling)).token_ids
        (decode,) = running.decode
        if breaks:
            breaks_now_and_then(decode._swaps._space)
        full = watch_for_a_full_pool(running)
        crowd = Crowd()
        tasks, leavers = [], []
        for index, prompt in enumerate(prompts):
            seeded = index % 8 == 0
            sampling = SamplingParams(temperature=0.8 if seeded else 0.0, seed=index, max_tokens=MAX_TOKENS)
            generation = Generation(tuple(prompt), sampling, priority=rng.randrange(-2, 3))
            tasks.append(asyncio.create_task(crowd.client(running, generation, truths[index])))
            if index % 3 == 1:
                leavers.append(crowd.leaving(tasks[-1], rng.randrange(CLIENTS * MAX_TOKENS // 2)))
        await asyncio.gather(*leavers)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [end for end in ended if end is not None and not isinstance(end, asyncio.CancelledError)] == []
        assert sum(isinstance(end, asyncio.CancelledError) for end in ended) > CLIENTS // 5, "hardly a client left"
        # No new request triggers the cleaning.
        await running.settle()
        load = decode.load()
        assert full(), "the pool was never full"
        if preemption == "recompute":
            assert (load.preemptions > 0, load.swaps) == (True, 0)
        else:
            assert load.swaps > 0, "nobody was swapped out"
            assert not breaks or load.preemptions > 0, "no copy failed"


async def test_an_urgent_request_passes_those_that_wait(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    prompt = [7, 8, 9, 10, 11]
    truth = tiny_oracle.greedy(prompt, 4)
    async with rack(tiny_llama_dir, engine={"max_sequences": 1}) as running:
        (prefill,) = running.prefill
        execute, release = prefill._stepper.execute, asyncio.Event()

        async def held(*step: object) -> object:
            await release.wait()
            return await execute(*step)  # type: ignore[arg-type]

        prefill._stepper.execute = held  # type: ignore[assignment,method-assign]
        ended: list[int] = []

        async def client(index: int, priority: int) -> None:
            sampling = SamplingParams(temperature=0.0, max_tokens=4)
            crowd = Crowd()
            await crowd.client(running, Generation(tuple(prompt), sampling, priority=priority), truth)
            ended.append(index)

        tasks = []
        for index, priority in enumerate((0, 0, 5, 0, -5)):
            tasks.append(asyncio.create_task(client(index, priority)))
            await until(lambda: prefill.load().waiting + prefill.load().running == len(tasks), "the request's turn")
        release.set()
        await asyncio.gather(*tasks)
        assert ended == [0, 4, 1, 3, 2]


def watch_for_a_full_pool(running: Rack) -> Callable[[], bool]:
    """Whether from now on a decode worker's pool had no block left to give at the beginning of a step."""
    (decode,) = running.decode
    execute, seen = decode._stepper.execute, []

    async def watched(*step: object, **more: object) -> object:
        seen.append(decode.pool.available)
        return await execute(*step, **more)  # type: ignore[arg-type]

    decode._stepper.execute = watched  # type: ignore[assignment,method-assign]
    return lambda: 0 in seen
