"""A client that leaves: both legs stop at once, whatever they are at."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from http_stage import http_stage
from rack import MODEL, until
from test_handoff_faults import Gate

PROMPT = [5, 6, 7, 8, 9, 10, 11]
MANY = 240


@pytest.mark.parametrize("stage", ["prefilling", "decoding"])
async def test_both_legs_stop(tiny_llama_dir: Path, stage: str) -> None:
    async with http_stage(tiny_llama_dir) as made:
        prefill, decode = made.prefill, made.decode
        # Held where it is to be met: a client that is slow would find it further on, or over.
        gate = Gate(prefill) if stage == "prefilling" else Gate(decode, open_for=2)
        # Greedy: tokens that were drawn may be parts of characters, whose text waits for the rest.
        params = {"max_tokens": MANY, "stream": True, "ignore_eos": True, "temperature": 0}
        body = {"model": MODEL, "prompt": PROMPT, **params}
        if stage == "prefilling":
            asking = asyncio.create_task(made.client.post("/v1/completions", json=body))
            await until(lambda: gate.held, "a step of prefill")
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        else:
            async with made.client.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.aiter_lines()
                # One event at least: a slow client gets several tokens in one.
                assert (await anext(lines)).startswith("data: {")
                assert await anext(lines) == ""
                await until(lambda: gate.held, "a third step of decode")
                assert decode.load().running == 1
        # The step that is under way ends; nothing follows it.
        gate.open()
        await until(lambda: not prefill._routers and not prefill.load().running, "the end of the prefill leg")
        await until(lambda: decode._scheduler.idle, "the end of the decode leg")
        await until(made.at_baseline, "the baseline of every pool")
        assert decode.load().decode_tokens < MANY / 2
        assert (prefill.load().open_leases, decode.load().open_imports) == (0, 0)
