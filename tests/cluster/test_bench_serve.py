"""``kvferry bench serve``: real routers with workers that compute nothing, and a server that is none of ours."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from refusals import Refused
from serve_cases import DONE, VOCABULARY, Answer, event, options, routed, speaking, usage

from cluster.bench.serve.answer import Stopwatch
from cluster.bench.serve.dialect import Dialect
from cluster.bench.serve.figures import ServeReport
from cluster.bench.serve.measure import ServeOptions, measure_serve
from cluster.bench.serve.prompt import PromptMaker
from cluster.bench.serve.report import headline, remarks, server_table, time_table
from cluster.bench.serve.server import Address, reached
from cluster.bench.serve.target import Target
from cluster.bench.traces.registry import make_trace
from protocol.errors import ConfigError, ConnectionFailed, KVFerryError
from router.front.keys import Key, KeyFile, hash_of, new_key

PATIENCE = 120.0


def said(report: ServeReport) -> str:
    return "\n".join([headline(report), *remarks(report)])


async def measured(*urls: str, **changed: Any) -> ServeReport:
    answers: list[bool] = []
    report = await measure_serve(options(*urls, **changed), answers.append)
    assert len(answers) == sum(server.requests for server in report.servers)
    assert answers.count(True) == sum(server.completed for server in report.servers)
    return report


async def test_an_open_loop_against_a_router(tiny_llama_dir: Path) -> None:
    async with routed(tiny_llama_dir, step=0.02) as url:
        report = await measured(url, rate=40.0, target=Target(ttft=10.0, tpot=1e-6))
    (server,), (records,) = report.servers, report.records
    assert (server.url, server.model) == (url, tiny_llama_dir.name)
    assert server.dialect == Dialect(token_ids=True, ignore_eos=True)
    assert (server.requests, server.completed, server.errors) == (12, 12, {})
    assert (server.prompt_tokens, server.output_tokens, server.wanted_tokens) == (240, 48, 48)
    assert [record.index for record in records] == [*range(12)]
    assert [record.due for record in records] == sorted(record.due for record in records)
    for record in records:
        assert (record.prompt_tokens, record.output_tokens) == (20, 4)
        assert record.late > 0.0
        assert record.ttft is not None
        assert record.late < record.ttft <= record.e2e
    assert server.ttft is not None
    assert server.gap is not None
    assert server.tpot is not None
    # Decode makes a token each 20 ms; the first of the answer is prefill's, which comes at once.
    assert server.tpot.p50 >= 0.005
    assert server.ttft.samples == server.tpot.samples == 12
    assert server.good == 0, "nobody makes a token in a microsecond"
    assert server.asked_rate is not None
    assert report.versus is None
    assert msgspec.json.decode(msgspec.json.encode(report), type=ServeReport) == report
    assert "40 requests/s" in headline(report)
    assert server_table(report).row_count == 1
    assert time_table(report).row_count == 5


async def test_a_first_token_waits_for_no_acknowledgement(tiny_llama_dir: Path) -> None:
    """On a connection that was used before, which is where the kernel would hold a second small write back."""
    async with routed(tiny_llama_dir) as url:
        report = await measured(url, concurrency=1)
    found = report.servers[0].ttft
    assert found is not None
    assert found.p50 < 0.03


async def test_arrivals_wait_for_no_answer(tiny_llama_dir: Path) -> None:
    async with routed(tiny_llama_dir, step=0.1) as url:
        report = await measured(url, requests=20, rate=400.0, output_tokens=6)
    (records,) = report.records
    assert max(record.due + record.late for record in records) < min(record.due + record.e2e for record in records)


async def test_a_fixed_number_is_under_way(tiny_llama_dir: Path) -> None:
    async with routed(tiny_llama_dir, step=0.005) as url:
        report = await measured(url, concurrency=3)
    (records,), (server,) = report.records, report.servers
    assert server.asked_rate is None
    assert server.completed == 12
    moments = sorted(
        [(record.due, 1) for record in records] + [(record.due + record.e2e, -1) for record in records],
        key=lambda moment: moment[0],
    )
    under_way, most = 0, 0
    for _, change in moments:
        under_way += change
        most = max(most, under_way)
    assert most == 3
    assert "a server that is slow is asked less" in said(report)


async def test_a_fixed_number_ends_when_its_time_is_up(tiny_llama_dir: Path) -> None:
    async with routed(tiny_llama_dir, step=0.005) as url:
        report = await measured(url, concurrency=2, requests=1_000_000, seconds=0.2)
    (records,) = report.records
    assert 2 <= len(records) < 1000
    assert max(record.due for record in records) <= records[0].due + 0.2


async def test_two_servers_take_turns_on_the_same_requests(tiny_llama_dir: Path) -> None:
    async with routed(tiny_llama_dir, step=0.002) as fast, routed(tiny_llama_dir, step=0.02) as slow:
        report = await measured(fast, slow, slice=5, output_tokens=8)
    versus, (mine, its) = report.versus, report.records
    assert versus is not None
    assert versus.pairs == 12
    assert versus.tpot is not None
    assert versus.tpot < 0.5
    assert versus.output is not None
    assert versus.output > 1.0
    assert [record.index for record in mine] == [record.index for record in its] == [*range(12)]
    # A slice ends with its last answer; then the other one has it.
    for begin in range(0, 12, 5):
        one, other = mine[begin : begin + 5], its[begin : begin + 5]
        first, second = sorted((one, other), key=lambda part: part[0].due)
        assert max(record.due + record.e2e for record in first) <= second[0].due
    assert "in turns of 5 requests" in said(report)


async def test_later_turns_find_what_the_earlier_ones_had(tiny_llama_dir: Path) -> None:
    """The prompt of a turn begins with the one before, as the server sees it."""
    prompts: list[list[int]] = []

    def answer(body: dict[str, Any]) -> Answer:
        prompts.append(body["prompt"])
        return 200, [event("a", "length"), event(None, **usage(len(body["prompt"]), 1)), DONE]

    async with speaking(answer, limit=None) as url:
        report = await measured(url, name="multi-turn", requests=40, rate=1.0, concurrency=1, warm=0, prompt_tokens=8)
    records = report.records[0]
    assert len(prompts) == 1 + len(records), "one asks how to ask"
    begun = sum(any(later[: len(each)] == each for later in prompts[place + 1 :]) for place, each in enumerate(prompts))
    assert begun >= 10
    assert {token for prompt in prompts for token in prompt} <= {*range(VOCABULARY[0], VOCABULARY[1] + 1)}


async def test_a_server_that_takes_only_text_gets_words() -> None:
    seen: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> Answer:
        seen.append(body)
        if not isinstance(body["prompt"], str) or "ignore_eos" in body:
            return 400, [b'{"error": {"message": "no", "code": 400}}']
        return 200, [event("a"), event("b", "stop"), event(None, **usage(22, 2)), DONE]

    async with speaking(answer) as url:
        report = await measured(url)
    (server,) = report.servers
    assert server.dialect == Dialect(token_ids=False, ignore_eos=False)
    assert (server.completed, server.prompt_tokens, server.output_tokens) == (12, 264, 24)
    assert report.trace.max_tokens == int(0.9 * 512)
    assert len(seen[-1]["prompt"].split()) == 20
    for line in ("takes no token ids", "answers end where the model ends them", "came to 24 tokens of 48"):
        assert line in said(report)


async def test_failures_are_counted_by_kind() -> None:
    count = 0

    def answer(body: dict[str, Any]) -> Answer:
        nonlocal count
        count += 1
        answers: list[Answer] = [
            (200, [event("a"), event("", "length"), event(None, **usage(20, 1)), DONE]),
            (429, [b"{}"]),
            (503, [b"{}"]),
            (200, [event("a")]),
            (200, [event("a"), b'data: {"error": {"message": "gone", "code": "worker_lost"}}\n\n']),
            (200, [event(None), DONE]),
        ]
        return answers[(count - 1) % 6]

    async with speaking(answer) as url:
        report = await measured(url, warm=5, target=Target(ttft=10.0))
    (server,) = report.servers
    assert (server.requests, server.completed, server.good) == (12, 2, 2)
    kinds = ("broken_stream", "empty_answer", "http_429", "http_503", "worker_lost")
    assert server.errors == dict.fromkeys(kinds, 2)
    assert "http_429 2" in said(report)


async def test_an_answer_that_takes_too_long_is_given_up(tiny_llama_dir: Path) -> None:
    async with routed(tiny_llama_dir, step=30.0) as url:
        report = await measured(url, requests=3, patience=0.2, warm=0)
    assert report.servers[0].errors == {"timeout": 3}
    assert report.servers[0].ttft is None
    assert time_table(report).row_count == 5


async def test_tokens_that_come_joined_are_told() -> None:
    def answer(_: dict[str, Any]) -> Answer:
        return 200, [event("a b c d", "length"), event(None, **usage(20, 4)), DONE]

    async with speaking(answer) as url:
        report = await measured(url)
    assert (report.servers[0].events, report.servers[0].output_tokens) == (12, 48)
    assert "4.00 to an event" in said(report)


async def test_a_request_is_sent_when_all_of_it_has_gone_out() -> None:
    """Whatever the generator does before that is its own time: connecting, or waiting for its turn on a busy loop."""
    prompts = PromptMaker("s", VOCABULARY)
    async with (
        speaking(lambda _: (200, [event("a", "length"), DONE])) as url,
        reached(Address(url), prompts) as server,
    ):
        (request,) = make_trace("poisson", requests=1, rate=1.0)
        watch = Stopwatch(due=1.0, now=1.0)
        assert await server.stream(server.body(prompts, request), watch, lambda: 5.0, PATIENCE) is None
    assert watch.record(0, began=0.0, asked=512, now=9.0).late == 4.0


async def test_who_is_not_there_or_serves_something_else_is_told(tiny_llama_dir: Path) -> None:
    with pytest.raises(ConnectionFailed):
        await measured("http://127.0.0.1:9")
    async with speaking(lambda _: (400, [b'{"error": {"message": "never"}}'])) as url:
        with pytest.raises(KVFerryError, match="never"):
            await measured(url)
        stranger = ServeOptions(servers=(Address(url, "gpt-9"),), trace=options(url).trace)
        with pytest.raises(ConfigError, match="does not serve 'gpt-9'; it serves m"):
            await measure_serve(stranger, lambda _: None)


def test_the_command_writes_figures_and_leaves_nothing(tiny_llama_dir: Path, tmp_path: Path) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}

    key = new_key()
    (tmp_path / "key").write_text(f"{key}\n")
    keys = tmp_path / "keys.yaml"
    keys.write_bytes(msgspec.yaml.encode(KeyFile([Key(name="me", sha256=hash_of(key))])))

    async def run() -> tuple[int | None, str, str]:
        async with routed(tiny_llama_dir, api_keys=str(keys)) as url:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "cluster", "bench", "serve", "--url", url, "--trace", "multi-turn"),
                *("--ramp", "100:200", "--requests", "15", "--output-tokens", "3", "--prompt-tokens", "10"),
                *("--slo", "ttft=10s,tpot=10s", "--vocabulary", "10:120", "--api-key-file", "key"),
                *("--json", "found.json"),
                cwd=tmp_path,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, err = await asyncio.wait_for(process.communicate(), PATIENCE)
        return process.returncode, out.decode(), err.decode()

    status, out, err = asyncio.run(run())
    assert status == 0, err
    report = msgspec.json.decode((tmp_path / "found.json").read_bytes(), type=ServeReport)
    assert report.servers[0].completed == report.servers[0].good == 15
    assert report.trace.rate_end == 200.0
    assert len(report.records[0]) == 15
    assert "TTFT" in out
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--rate", "1", "--concurrency", "2"), "--rate, --ramp and --concurrency are three ways"),
        (("--ramp", "5"), "ramp must be two numbers"),
        (("--trace", "nonsense"), "trace must be of poisson"),
        (("--slo", "ttft=5"), "ttft must be a time such as 500ms"),
        (("--slo", "speed=5ms"), "slo must be of ttft, tpot, e2e"),
        (("--vocabulary", "9:3"), "vocabulary must lie in"),
        (("--concurrency", "0"), "concurrency must lie in"),
        (("--salt", "s" * 33), "salt must have 1 to 32 bytes"),
        (("--api-key-file", "nowhere"), "api_key_file nowhere cannot be read"),
        (("--json", "nowhere/x"), "there is no folder"),
        (("--vs", "http://127.0.0.1:9", "--concurrency", "2", "--seconds", "5"), "seconds does not go with"),
    ],
)
def test_wrong_options_are_named_before_anybody_is_asked(
    refused: Refused, arguments: tuple[str, ...], told: str
) -> None:
    ended = refused("bench", "serve", "--url", "http://127.0.0.1:9", *arguments)
    assert ended.status != 0
    assert told in " ".join(ended.err.split())
