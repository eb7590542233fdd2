"""The router's part of a trace when attempts fail: each has its span, and its workers go on from that."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from collector import Collector, receiving
from front_stage import CHAT, IM_END, ScriptedService, one_by_one, serving, write_checkpoint
from scripted_workers import ScriptedWorker, fleet_at, until
from test_server import routing
from worker_facts import MODEL

from protocol.tracing.config import TracingConfig, tracing
from router.front.app import Front
from router.request_trace import RequestTraces
from router.tokenizer import Tokenizer

CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with receiving(monkeypatch) as found:
        yield found


async def test_a_killed_workers_request_shows_both_attempts(tmp_path: Path, there: Collector) -> None:
    tokenizer = write_checkpoint(tmp_path / "tokenizer", vocab_size=1000)
    tracing = TracingConfig(endpoint=there.url, service_name="pier")
    async with (
        routing(tokenizer, tracing=tracing) as server,
        fleet_at(server.hub_endpoint) as fleet,
        httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=20.0) as client,
    ):
        fleet.add("prefill", "p0")
        decoders = [fleet.add("decode", name) for name in ("d0", "d1")]
        await until(lambda: server.service.health().decode_workers == 2 and server.service.health().ready)
        for worker in decoders:
            worker.hold = 3
        asked = {"model": MODEL, "prompt": "the ferry", "max_tokens": 6, "ignore_eos": True, "temperature": 0}
        task = asyncio.create_task(client.post("/v1/completions", json=asked))
        await until(lambda: any(worker.told for worker in decoders))
        (first,) = [worker for worker in decoders if worker.opened]
        (second,) = [worker for worker in decoders if worker is not first]
        await first.kill()
        second.hold = None
        answer = await task
        assert answer.status_code == 200
    check(there, answer, first, second)


def check(there: Collector, answer: httpx.Response, first: ScriptedWorker, second: ScriptedWorker) -> None:
    (root,) = there.named(f"text_completion {MODEL}")
    assert root.attributes["kvferry.request_id"] == answer.headers["x-request-id"]
    assert root.attributes["gen_ai.usage.output_tokens"] == 6
    assert not root.error, "the client has noticed nothing"
    _, lost, served = there.under(root)
    assert [span.attributes["kvferry.attempt"] for span in (lost, served)] == [0, 1]
    assert [span.attributes["kvferry.decode_worker"] for span in (lost, served)] == [first.peer.name, second.peer.name]
    assert (lost.error, lost.attributes["error.type"], lost.links) == (True, "worker_lost", [])
    assert first.peer.name in lost.status
    assert (served.error, served.links) == (False, [lost.span])
    assert lost.end <= served.start
    assert served.events[0][0] == "first_token"
    for span, worker in ((lost, first), (served, second)):
        (opened,) = worker.opened
        assert opened.traceparent == f"00-{root.trace}-{span.span}-0{opened.traceparent[-1]}"
        assert int(opened.traceparent[-1]) & 1, "sampled"
        assert [child.name for child in there.under(span)] == ["queue", "route"]


async def test_what_no_worker_could_serve_is_an_error_of_ours(tmp_path: Path, there: Collector) -> None:
    tokenizer = write_checkpoint(tmp_path / "tokenizer", vocab_size=1000)
    tracing = TracingConfig(endpoint=there.url, sample_ratio=1.0)
    async with (
        routing(tokenizer, tracing=tracing) as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as client,
    ):
        answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": "the ferry"})
        assert answer.status_code == 503
    (root,) = there.named(f"text_completion {MODEL}")
    assert (root.error, root.attributes["error.type"]) == (True, "no_worker_available")
    assert root.attributes["http.response.status_code"] == 503
    assert "gen_ai.response.finish_reasons" not in root.attributes
    assert not there.named("attempt"), "it was never placed"


async def test_an_unsampled_request_tells_its_workers_nothing(tmp_path: Path, there: Collector) -> None:
    tokenizer = write_checkpoint(tmp_path / "tokenizer", vocab_size=1000)
    tracing = TracingConfig(endpoint=there.url, sample_ratio=0.0)
    async with (
        routing(tokenizer, tracing=tracing) as server,
        fleet_at(server.hub_endpoint) as fleet,
        httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=20.0) as client,
    ):
        prefill, _ = fleet.add("prefill", "p0"), fleet.add("decode", "d0")
        await until(lambda: server.service.health().ready)
        answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": "the ferry", "max_tokens": 2})
        assert answer.status_code == 200
        assert prefill.opened[0].traceparent == ""
    assert there.spans == []


@pytest.mark.parametrize(
    ("said", "stop", "reason"),
    [(CALL, None, "tool_calls"), (CALL, "<tool", "stop"), ("the ferry", None, "stop"), ("the ferry", "fer", "stop")],
)
async def test_it_tells_the_end_that_the_client_is_told(
    said: str, stop: str | None, reason: str, bpe_tokenizer: Tokenizer, there: Collector
) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    service = ScriptedService(one_by_one((*bpe_tokenizer.encode(said), IM_END), "stop"), max_model_len=4096)
    async with tracing(TracingConfig(endpoint=there.url, sample_ratio=1.0), "router", "r") as tracer:
        assert tracer is not None
        with serving(Front(service, bpe_tokenizer, traces=RequestTraces(tracer, MODEL))) as url:
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=20.0) as client:
                answer = await client.post("/v1/chat/completions", json={**CHAT, "tools": tools, "stop": stop})
    assert answer.json()["choices"][0]["finish_reason"] == reason
    (root,) = there.named(f"chat {MODEL}")
    assert root.attributes["gen_ai.response.finish_reasons"] == [reason]
