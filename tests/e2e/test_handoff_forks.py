"""Several continuations of one prompt: one prefill, one handoff, and each the text that it has alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest
from oracle import Oracle
from rack import Rack, rack, until
from test_handoff_faults import Gate

from decode_worker.speculation import Speculation
from protocol.ids import Peer
from protocol.messages import Message
from protocol.sampling import SamplingParams
from router.front.generation import Generation, Output

BLOCK = 4
DRAWN: dict[str, object] = {"temperature": 1.1, "top_p": 0.95, "max_tokens": 14}


def prompt_of(length: int, oracle: Oracle, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, oracle.vocab_size) for _ in range(length))


def copies(prompt: tuple[int, ...], n: int, **sampling: object) -> list[Generation]:
    return [
        Generation(prompt, SamplingParams(**{**DRAWN, "seed": seed, **sampling}))  # type: ignore[arg-type]
        for seed in range(n)
    ]


async def read(outputs: AsyncGenerator[Output, None]) -> list[int]:
    async with aclosing(outputs):
        return [token_id async for output in outputs for token_id in output.token_ids]


async def ask_together(running: Rack, generations: list[Generation]) -> list[list[int]]:
    with running.service.together(generations) as each:
        return await asyncio.gather(*map(read, each))


async def ask_apart(running: Rack, generations: list[Generation]) -> list[list[int]]:
    return [await read(running.service.generate(generation)) for generation in generations]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 2])
async def test_one_prefill_and_one_handoff_serve_all(tiny_llama_dir: Path, tiny_oracle: Oracle, length: int) -> None:
    prompt = prompt_of(length, tiny_oracle)
    async with rack(tiny_llama_dir) as running:
        together = await ask_together(running, copies(prompt, 5))
        prefill, decode = (worker.load() for worker in running.workers())
        blocks = -(-length // BLOCK)
        assert (prefill.prefill_tokens, prefill.cached_tokens) == (length, 0), "the prompt was computed once"
        assert (prefill.kv_blocks, decode.kv_blocks) == (blocks, blocks), "its blocks crossed once"
        assert running.prefill[0].transfer().opened == 1
        assert len({tuple(tokens) for tokens in together}) > 1, "five seeds gave one text"
        assert together == await ask_apart(running, copies(prompt, 5))
        # And greedy, where a wrong copy would show against the oracle.
        greedy = await ask_together(running, copies(prompt, 3, temperature=0.0))
        assert greedy == [tiny_oracle.greedy(prompt, 14)] * 3


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, 2 * BLOCK + 1])
async def test_each_continuation_guesses_for_itself(tiny_llama_dir: Path, tiny_oracle: Oracle, length: int) -> None:
    prompt = prompt_of(length, tiny_oracle) * 3
    guessing = {"speculation": Speculation(tokens=5, min_match=1)}
    async with rack(tiny_llama_dir) as plain:
        expected = await ask_together(plain, copies(prompt, 4, max_tokens=40, temperature=0.7))
    async with rack(tiny_llama_dir, decode_transfer=guessing) as running:
        assert await ask_together(running, copies(prompt, 4, max_tokens=40, temperature=0.7)) == expected
        greedy = await ask_together(running, copies(prompt, 3, max_tokens=40, temperature=0.0))
        assert greedy == [tiny_oracle.greedy(prompt, 40)] * 3
        load = running.decode[0].load()
        assert load.draft_tokens >= load.accepted_tokens > 0


async def test_the_shared_partial_block_is_copied_when_it_is_written(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    prompt = prompt_of(2 * BLOCK + 2, tiny_oracle, seed=1)
    async with rack(tiny_llama_dir, engine={"prefix_cache": False}) as running:
        pool = running.decode[0].pool
        with running.service.together(copies(prompt, 4, max_tokens=200)) as each:
            readers = [asyncio.create_task(read(outputs)) for outputs in each]
            await until(lambda: running.decode[0].load().running == 4, "four sequences")
            shared = [block for block in range(1, pool.num_blocks) if pool.holders(block) == 4]
            assert len(shared) >= 2, "the prompt's full blocks are held once, by all"
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
        await running.settle()


async def test_each_continuation_ends_and_is_cancelled_by_itself(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    prompt = prompt_of(9, tiny_oracle, seed=2)
    async with rack(tiny_llama_dir) as running:
        alone = await ask_apart(running, copies(prompt, 4))
        with running.service.together(copies(prompt, 4)) as (first, second, third, fourth):
            # The first is never read at all, the second left after a token: neither takes the others along.
            await anext(second)
            await second.aclose()
            rest = await asyncio.gather(read(third), read(fourth))
        del first
        assert rest == alone[2:]
        await running.settle()


async def test_stop_at_the_first_token_ends_that_one_alone(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    prompt = prompt_of(6, tiny_oracle, seed=3)
    async with rack(tiny_llama_dir) as running:
        alone = await ask_apart(running, copies(prompt, 4))
        for index in range(4):
            stops = (alone[index][0],)
            expected = await ask_apart(running, copies(prompt, 4, stop_token_ids=stops))
            assert len(expected[index]) == 1
            assert await ask_together(running, copies(prompt, 4, stop_token_ids=stops)) == expected
        # One token each: no handoff at all.
        before = running.prefill[0].load().kv_blocks
        single = await ask_together(running, copies(prompt, 4, max_tokens=1))
        assert single == [tokens[:1] for tokens in alone]
        assert running.prefill[0].load().kv_blocks == before


async def test_more_than_run_side_by_side_and_more_than_the_pool_holds(
    tiny_llama_dir: Path, tiny_oracle: Oracle
) -> None:
    prompt = prompt_of(10, tiny_oracle, seed=4)
    async with rack(tiny_llama_dir) as running:
        alone = await ask_apart(running, copies(prompt, 9))
    small: dict[str, object] = {"num_blocks": 14, "max_sequences": 6, "max_model_len": 40}
    async with rack(tiny_llama_dir, decode_engine=small) as running:
        assert await ask_together(running, copies(prompt, 9)) == alone
        load = running.decode[0].load()
        assert load.preemptions or load.swaps, "the pool was to be too small"


@pytest.mark.parametrize("leaving", [(0,), (1,), (0, 1, 2)], ids=["the first", "another", "all"])
@pytest.mark.parametrize("stage", ["prefilling", "half shipped", "landed"])
async def test_a_cancel_at_each_stage_leaves_the_others_their_text(
    tiny_llama_dir: Path, tiny_oracle: Oracle, stage: str, leaving: tuple[int, ...]
) -> None:
    prompt = prompt_of(41, tiny_oracle, seed=5)
    truth = tiny_oracle.greedy(prompt, 14)
    async with rack(tiny_llama_dir) as running:
        (prefill,), (decode,) = running.prefill, running.decode
        gate = Gate(decode) if stage == "landed" else Gate(prefill, open_for=stage == "half shipped")
        with running.service.together(copies(prompt, 3, temperature=0.0)) as each:
            readers = [asyncio.create_task(read(outputs)) for outputs in each]
            await until(lambda: gate.held == 1 and decode.load().kv_blocks in (0, 4, 11), f"the stage {stage!r}")
            for index in leaving:
                readers[index].cancel()
            await asyncio.gather(*(readers[index] for index in leaving), return_exceptions=True)
            # A request behind the cancels: once it is there, both workers have heard of them.
            probe = asyncio.create_task(running.ask(prompt[:5]))
            if stage == "landed":
                await until(lambda: decode.load().running == 4 - len(leaving), "the request behind, at decode")
            else:
                await until(lambda: prefill.load().waiting + prefill.load().running == 2, "the request behind")
            gate.open()
            answers = await asyncio.gather(*readers, return_exceptions=True)
            await probe
        kept = [tokens for index, tokens in enumerate(answers) if index not in leaving]
        assert kept == [truth] * (3 - len(leaving))


async def test_a_prefill_worker_dies_and_each_goes_on_elsewhere(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    prompt = prompt_of(41, tiny_oracle, seed=6)
    async with rack(tiny_llama_dir, prefill=2, router={"worker_timeout": 1.0}) as running:
        gates = [Gate(worker, open_for=1) for worker in running.prefill]
        asked = asyncio.create_task(ask_together(running, copies(prompt, 3)))
        await until(lambda: any(gate.held for gate in gates), "a prompt half computed")
        victim = next(index for index, gate in enumerate(gates) if gate.held)
        stopping = asyncio.create_task(running.prefill.pop(victim).stop())
        for gate in gates:
            gate.open()
        together = await asked
        await stopping
        assert together == await ask_apart(running, copies(prompt, 3))


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_cancel_that_overtakes_the_opening_ends_nobody_elses(
    tiny_llama_dir: Path, tiny_oracle: Oracle, role: str
) -> None:
    prompt = prompt_of(22, tiny_oracle, seed=7)
    async with rack(tiny_llama_dir) as running:
        worker = (running.prefill if role == "prefill" else running.decode)[0]
        held: list[tuple[Peer, Message]] = []
        deliver = worker._link._on_message
        worker._link._on_message = lambda *message: held.append(message)
        with running.service.together(copies(prompt, 3)) as each:
            readers = [asyncio.create_task(read(outputs)) for outputs in each]
            await until(lambda: held, "the message that opens")
            readers[0].cancel()
            await until(lambda: len(held) > 1, "the cancel")
            worker._link._on_message = deliver
            for message in reversed(held):
                deliver(*message)
            rest = await asyncio.gather(*readers[1:])
        assert rest == (await ask_apart(running, copies(prompt, 3)))[1:]
