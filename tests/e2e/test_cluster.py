"""The cluster as a user has it, with the shipped model: its text is transformers' text, whatever happens to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from cluster_fixture import BLOCK, CHUNK, Running, cluster, run, status_json, until
from oracle import Oracle

from cluster.model_store import resolve_model
from protocol.layout import KVLayout

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

LAYOUT = KVLayout(num_layers=30, kv_heads=3, head_dim=64, block_size=BLOCK, dtype="float32")
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5)
TEXTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):",
    "Water boils at",
    "The three primary colours are",
    "1, 1, 2, 3, 5, 8,",
    "In 1969, the first human",
    "A ferry is a boat that",
    "Ünïcödé: naïve café, 東京, 🚢",
    "To be, or not to be, that is",
    "The opposite of hot is",
    "SELECT name FROM users WHERE",
)
TOKENS = 12
MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_model(MODEL)


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest.fixture(scope="module")
def prompts(oracle: Oracle, model: Path) -> list[tuple[list[int], list[int]]]:
    """``(prompt, what transformers says)``: at every border of block and chunk, and real text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = random.Random(0)
    asked = [[rng.randrange(100, oracle.vocab_size) for _ in range(length)] for length in LENGTHS]
    asked += [tokenizer(text)["input_ids"] for text in TEXTS]
    return list(zip(asked, oracle.greedy_together(asked, TOKENS), strict=True))


@pytest.fixture(scope="module")
def running(
    prompts: list[tuple[list[int], list[int]]], model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    # The oracle's answers come first: transformers and the cluster would fight for two cores.
    with cluster(tmp_path_factory.mktemp("cluster"), model, prefill=2, decode=2) as up:
        yield up


@pytest.fixture(autouse=True)
def baseline(running: Running) -> Iterator[None]:
    yield
    running.settle()


def decoded(model: Path, token_ids: list[int]) -> str:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model / "tokenizer.json")).decode(token_ids)


async def complete(url: str, prompt: list[int], **params: object) -> str:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **params}
    async with httpx.AsyncClient(trust_env=False, timeout=120.0) as client:
        answer = await client.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


async def test_greedy_text_is_transformers_text(
    running: Running, model: Path, prompts: list[tuple[list[int], list[int]]]
) -> None:
    assert len(prompts) >= 20
    for prompt, truth in prompts:
        before = running.shipped()
        assert await complete(running.url, prompt) == decoded(model, truth), f"prompt of {len(prompt)}"

        def crossed(before: tuple[int, int] = before) -> tuple[int, int]:
            blocks, nbytes = running.shipped()
            return blocks - before[0], nbytes - before[1]

        blocks = LAYOUT.blocks_for(len(prompt))
        # A heartbeat may be on its way.
        until(lambda: crossed() == (blocks, blocks * LAYOUT.block_bytes), f"{blocks} blocks in the metric", 5.0)  # noqa: B023


async def test_sixteen_streams_at_once(
    running: Running, model: Path, prompts: list[tuple[list[int], list[int]]]
) -> None:
    chosen = prompts[:16]
    answers = await asyncio.gather(*(complete(running.url, prompt) for prompt, _ in chosen))
    assert answers == [decoded(model, truth) for _, truth in chosen]


def test_the_openai_package_works_unmodified(running: Running) -> None:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        assert [served.id for served in client.models.list()] == [MODEL]
        messages: list[openai.types.chat.ChatCompletionMessageParam] = [
            {"role": "user", "content": "What is the capital of France? One word."}
        ]
        whole = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=24)
        assert whole.usage is not None
        stream = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert "Paris" in text
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        again = client.completions.create(model=MODEL, prompt="A ferry is", max_tokens=8, seed=5, temperature=0.8)
        assert (
            again.choices[0].text
            == client.completions.create(model=MODEL, prompt="A ferry is", max_tokens=8, seed=5, temperature=0.8)
            .choices[0]
            .text
        )


async def test_the_openai_package_works_asynchronously(running: Running) -> None:
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        stream = await client.completions.create(model=MODEL, prompt="One, two,", max_tokens=8, stream=True)
        assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "length"


BAD = {
    "wrong model": ({"model": "gpt-9", "prompt": "a"}, 404, "model"),
    "empty prompt": ({"prompt": ""}, 400, "prompt"),
    "empty token list": ({"prompt": []}, 400, "prompt"),
    "prompt too long": ({"prompt": [5] * 1100}, 400, "prompt"),
    "output too long": ({"prompt": "a", "max_tokens": 100_000}, 400, "max_tokens"),
    "negative max_tokens": ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    "token outside the vocabulary": ({"prompt": [5, 999_999]}, 400, "prompt"),
    "wrong type": ({"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    "out of range": ({"prompt": "a", "top_p": 7}, 400, "top_p"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_by_field(running: Running, case: str) -> None:
    body, status, field = BAD[case]
    answer = httpx.post(f"{running.url}/v1/completions", json={"model": MODEL, **body}, trust_env=False)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] is not None
    assert error["param"].startswith(field)


@pytest.mark.parametrize("body", [b"{", b"", b"[1, 2]", b'{"model": "smollm2-135m", "prompt": "a" "b"}', b"\xff\xfe"])
def test_what_is_no_json_is_told(running: Running, body: bytes) -> None:
    answer = httpx.post(f"{running.url}/v1/chat/completions", content=body, trust_env=False)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_body_of_ten_megabytes_is_refused(running: Running) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x" * 10_000_000}).encode()
    answer = httpx.post(f"{running.url}/v1/completions", content=body, trust_env=False, timeout=30.0)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "payload_too_large"


async def test_a_client_that_leaves_stops_both_legs(running: Running) -> None:
    body = {"model": MODEL, "prompt": "Count: 1,", "max_tokens": 900, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(trust_env=False, timeout=60.0) as client:
        async with client.stream("POST", f"{running.url}/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            for _ in range(6):
                await anext(lines)
        await asyncio.to_thread(until, lambda: running.at_baseline(), "the baseline after a disconnect", 15.0)


def pid_of(running: Running, name: str) -> int:
    return int(str(running.workers()[name]["pid"]))


def streaming_on(running: Running) -> str | None:
    """The decode worker that generates at the moment."""
    for name, worker in running.workers().items():
        load = worker["load"]
        assert isinstance(load, dict)
        if worker["role"] == "decode" and load["running"]:
            return name
    return None


async def collect(url: str, prompt: list[int], tokens: int, begun: asyncio.Event, **params: object) -> str:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, **params}
    text = ""
    async with (
        httpx.AsyncClient(trust_env=False, timeout=120.0) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                piece = json.loads(line[6:])
                assert "error" not in piece, piece
                text += piece["choices"][0]["text"] if piece["choices"] else ""
                begun.set()
    return text


@pytest.mark.parametrize(
    ("number", "sampling"),
    [
        (signal.SIGKILL, {"temperature": 0.8, "seed": 11}),
        (signal.SIGSTOP, {"temperature": 0}),
    ],
    ids=["killed", "stopped"],
)
async def test_nobody_notices_the_death_of_a_decode_worker(
    running: Running, number: signal.Signals, sampling: dict[str, object]
) -> None:
    prompt = [100 + index for index in range(40)]
    tokens = 96
    truth = await complete(running.url, prompt, max_tokens=tokens, **sampling)
    begun = asyncio.Event()
    stream = asyncio.create_task(collect(running.url, prompt, tokens, begun, **sampling))
    await begun.wait()
    victim = ""
    while not victim:
        assert not stream.done(), "the stream was over before its worker could be found"
        victim = await asyncio.to_thread(streaming_on, running) or ""
    pid = pid_of(running, victim)
    os.kill(pid, number)
    try:
        assert await stream == truth
    finally:
        if number is signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    # It comes back by itself, and works at once.
    await asyncio.to_thread(until, lambda: len(running.workers()) == 4, "the worker's return", 90.0)


async def test_nobody_notices_the_death_of_a_prefill_worker(
    running: Running, model: Path, prompts: list[tuple[list[int], list[int]]]
) -> None:
    asked = prompts[8:14]
    requests = [asyncio.create_task(complete(running.url, [7, *prompt])) for prompt, _ in asked]
    os.kill(pid_of(running, "prefill-0"), signal.SIGKILL)
    answers = await asyncio.gather(*requests)
    await asyncio.to_thread(until, lambda: len(running.workers()) == 4, "the worker's return", 90.0)
    again = [await complete(running.url, [7, *prompt]) for prompt, _ in asked]
    assert answers == again


def test_status_and_the_commands(running: Running) -> None:
    report = status_json(running)
    assert report["state"] == "ready"
    shown = run(
        "complete", "The capital of France is", "--max-tokens", "4", "--temperature", "0", folder=running.folder
    )
    assert shown.returncode == 0, shown.stderr
    assert "Paris" in shown.stdout
    chat = run("chat", "Say hello.", "--max-tokens", "8", "--temperature", "0", folder=running.folder)
    assert chat.returncode == 0, chat.stderr
    assert chat.stdout.strip()


def test_the_pool_metrics_balance(running: Running) -> None:
    pools = running.pools()
    assert set(pools) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    for pool in pools.values():
        states = ("free", "active", "cached", "exported", "importing", "draining", "reserved")
        assert sum(pool[state] for state in states) == pool["total"] == 256
    with contextlib.closing(httpx.Client(trust_env=False)) as client:
        text = client.get(f"{running.url}/metrics").text
    leaked = [line for line in text.splitlines() if line.startswith("kvferry_pool_leaked_blocks{")]
    assert len(leaked) == 4
    assert all(float(line.rsplit(" ", 1)[1]) == 0 for line in leaked)
