"""Requests of every shape that the OpenAPI document allows, and of others, to a router with workers behind it.

No answer says that something broke inside, each is one that the document tells of, and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import psutil
import pytest
from http_stage import MODEL, http_stage
from hypothesis import settings
from rack import until

FUZZ = Path(__file__).with_name("schema_fuzz.py")
GENERATING = ("/v1/chat/completions", "/v1/completions")
GROWTH = 256 << 20
"""Bytes that the router and its workers may take for all that is asked."""


async def fuzzed(url: str, examples: int) -> dict[str, int]:
    """How many answers each path gave, by another process: what draws requests keeps what it drew."""
    asked = [url, MODEL, f"--examples={examples}", *["--same"] * settings().derandomize]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, FUZZ, *asked, stdout=pipe, stderr=pipe)
    try:
        out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    served: dict[str, int] = json.loads(out.splitlines()[-1])
    return served


async def test_whatever_is_asked_is_answered_as_the_document_says(
    tiny_llama_dir: Path, request: pytest.FixtureRequest
) -> None:
    async with http_stage(tiny_llama_dir, max_model_len=48) as stage:
        before = psutil.Process().memory_info().rss
        served = await fuzzed(stage.url, request.config.getoption("fuzz_examples"))
        assert psutil.Process().memory_info().rss - before < GROWTH
        # If none had come so far as the workers, this would say nothing of them.
        assert any(served.get(path) for path in GENERATING)
        await until(lambda: stage.prefill.load().running == 0, "idle workers")
        assert (await stage.complete("a")).json()["choices"]
