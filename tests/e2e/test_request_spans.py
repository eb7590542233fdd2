"""One trace for each request: of the router, the prefill and the decode worker, as a collector is sent it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from collector import Collector, Seen, receiving
from http_stage import Stage, http_stage
from prometheus_client.parser import text_string_to_metric_families
from rack import until
from test_handoff_faults import Gate

from protocol.tracing.config import TracingConfig

PROMPT = list(range(5, 27))
"""Of 22 tokens: in blocks of 4, computed in chunks of 16 and 6."""
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ASKED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
PAGE = (Path(__file__).parents[2] / "docs" / "tracing.md").read_text()
DOCUMENTED = {
    (name, by)
    for cell, by in re.findall(r"^\| (`.+?`) \| (router|prefill|decode) \|", PAGE, re.MULTILINE)
    for name in re.findall(r"`(.+?)`", cell)
}
SLACK = 2_000_000
"""Nanoseconds by which the processes' ways from one clock to the other may differ."""


@pytest.fixture(scope="module")
def there() -> Iterator[Collector]:
    patch = pytest.MonkeyPatch()
    with receiving(patch) as found:
        yield found
    patch.undo()


@pytest.fixture
async def stage(tiny_llama_dir: Path, there: Collector) -> AsyncIterator[Stage]:
    there.spans.clear()
    async with http_stage(tiny_llama_dir, tracing=TracingConfig(endpoint=there.url)) as made:
        yield made


async def came(there: Collector, condition: Callable[[], object], what: str) -> None:
    await until(condition, f"{what}: {[(span.service, span.name) for span in there.spans]}")


async def whole(there: Collector, trace: str, *names: str) -> Seen:
    """The first span of a trace, once it and what else is named have come."""
    await came(there, lambda: all(there.named(name, trace) for name in names), "all spans")
    (root,) = [
        span for span in there.spans if span.trace == trace and span.service == "kvferry-router" and span.kind == 2
    ]
    return root


def children(there: Collector, parent: Seen) -> dict[str, Seen]:
    found = there.under(parent)
    assert len({span.name for span in found}) == len(found)
    return {span.name: span for span in found}


def in_order(*spans: Seen) -> bool:
    starts = [span.start for span in spans]
    return starts == sorted(starts) and all(span.start <= span.end for span in spans)


async def test_one_request_is_one_trace_of_three_processes(stage: Stage, there: Collector) -> None:
    answer = await stage.complete(PROMPT, ASKED, max_tokens=5)
    root = await whole(there, TRACE, "text_completion tiny", "prefill_worker", "decode_worker")
    assert {span.trace for span in there.spans} == {TRACE}
    assert root.parent == PARENT
    assert {span.service for span in there.spans} == {"kvferry-router", "kvferry-prefill", "kvferry-decode"}
    told = root.attributes
    assert told["kvferry.request_id"] == answer.headers["x-request-id"]
    assert (told["gen_ai.operation.name"], told["gen_ai.request.model"]) == ("text_completion", "tiny")
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (22, 5)
    assert (told["gen_ai.response.finish_reasons"], told["http.response.status_code"]) == (["length"], 200)
    assert 0.0 < float(str(told["gen_ai.response.time_to_first_chunk"])) <= (root.end - root.start) / 1e9
    assert "gen_ai.input.messages" not in told

    at_router = children(there, root)
    assert [*at_router] == ["tokenize", "attempt"]
    attempt = at_router["attempt"]
    assert attempt.attributes["kvferry.prefill_worker"] == "prefill-0"
    assert attempt.attributes["kvferry.decode_worker"] == "decode-0"
    assert [name for name, _, _ in attempt.events] == ["first_token", "taken_over"]
    legs = children(there, attempt)
    assert {*legs} == {"queue", "route", "prefill_worker", "decode_worker"}
    assert legs["route"].attributes["kvferry.policy"] == "cost"
    assert legs["queue"].end == legs["route"].start < legs["route"].end
    assert float(str(legs["route"].attributes["kvferry.predicted_ttft"])) >= 0.0

    prefill = children(there, legs["prefill_worker"])
    assert {*prefill} == {"queue", "prefill", "grant_wait", "ship", "settle"}
    assert [about["kvferry.computed_tokens"] for _, _, about in prefill["prefill"].events] == [16, 22]
    blocks = -(-len(PROMPT) // 4)
    assert prefill["ship"].attributes["kvferry.kv.blocks"] == blocks
    assert prefill["ship"].attributes["kvferry.kv.transport"] == "shm"
    sent = [int(str(about["kvferry.kv.bytes"])) for _, _, about in prefill["ship"].events]
    assert sum(sent) == prefill["ship"].attributes["kvferry.kv.bytes"]
    decode = children(there, legs["decode_worker"])
    assert [*decode] == ["reserve", "import", "first_step", "decode"]
    assert decode["import"].attributes["kvferry.kv.blocks"] == blocks
    assert decode["decode"].attributes["gen_ai.usage.output_tokens"] == 4

    assert in_order(at_router["tokenize"], attempt, legs["route"])
    assert in_order(prefill["queue"], prefill["prefill"], prefill["settle"])
    assert decode["reserve"].end == decode["import"].start <= decode["import"].end == decode["first_step"].start
    assert decode["first_step"].end == decode["decode"].start
    assert legs["route"].end <= min(legs["prefill_worker"].start, legs["decode_worker"].start) + SLACK
    assert prefill["settle"].start <= decode["import"].end + SLACK
    assert decode["import"].end <= prefill["settle"].end + SLACK
    for parent in (root, attempt, legs["prefill_worker"], legs["decode_worker"]):
        for child in there.under(parent):
            assert parent.start - SLACK <= child.start
    for each in (*prefill.values(), *decode.values()):
        assert each.end <= max(legs["prefill_worker"].end, legs["decode_worker"].end)
    named = {(span.name.replace("tiny", "MODEL"), span.service.removeprefix("kvferry-")) for span in there.spans}
    assert named == DOCUMENTED - {("chat MODEL", "router")}

    def exported() -> dict[str, float]:
        families = text_string_to_metric_families(metrics.text)
        return {
            sample.labels["worker"]: sample.value
            for family in families
            for sample in family.samples
            if sample.name == "kvferry_spans_exported_total"
        }

    metrics = await stage.client.get("/metrics")
    while exported() != {"router-0": 5.0, "prefill-0": 6.0, "decode-0": 5.0}:
        await asyncio.sleep(0.05)
        metrics = await stage.client.get("/metrics")


async def test_choices_of_one_prompt_are_attempts_beside_each_other(stage: Stage, there: Collector) -> None:
    await stage.complete(PROMPT, ASKED, max_tokens=3, n=2, temperature=1.0, stream=False)
    await came(there, lambda: len(there.named("decode_worker")) == 2 and there.named("prefill_worker"), "both choices")
    root = await whole(there, TRACE, "text_completion tiny")
    tokenize, *attempts = there.under(root)
    assert tokenize.name == "tokenize"
    assert sorted(str(each.attributes["kvferry.choice"]) for each in attempts) == ["0", "1"]
    (carrier,) = [each for each in attempts if any(span.name == "prefill_worker" for span in there.under(each))]
    assert carrier.attributes["kvferry.choice"] == 0
    lanes = [span for span in there.under(carrier) if span.name == "decode_worker"]
    assert [[span.name for span in there.under(lane)][-2:] for lane in lanes] == [["first_step", "decode"]] * 2
    assert root.attributes["gen_ai.usage.output_tokens"] == 6


async def test_who_leaves_and_who_errs_are_told_so(stage: Stage, there: Collector) -> None:
    # Held, so that it cannot be over before we have left.
    gate = Gate(stage.decode, open_for=1)
    # Greedy: a token that was drawn may be part of a character, whose text waits for the rest, or the end.
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 200, "stream": True, "temperature": 0, "ignore_eos": True}
    async with stage.client.stream("POST", "/v1/completions", json=body) as answer:
        await anext(answer.aiter_bytes())
    await came(there, lambda: there.named("text_completion tiny"), "the end")
    gate.open()
    await came(there, lambda: there.named("decode_worker"), "the end on decode")
    (left,) = there.named("text_completion tiny")
    assert (left.error, left.attributes["error.type"]) == (False, "request_cancelled")
    (attempt,) = there.named("attempt")
    assert attempt.attributes["kvferry.cancelled"] is True
    (leg,) = there.named("decode_worker")
    assert leg.attributes["kvferry.cancelled"] is True
    there.spans.clear()
    refused = await stage.client.post("/v1/completions", json={"model": "tiny", "prompt": "my secret", "max_tokens": 0})
    assert refused.status_code == 400
    await came(there, lambda: there.named("text_completion tiny"), "the refusal")
    (span,) = there.spans
    assert (span.error, span.attributes["error.type"]) == (False, "invalid_request")
    assert span.attributes["http.response.status_code"] == 400
    assert "secret" not in str(span)


async def test_what_a_stop_string_ends_has_finished_and_was_cancelled_nowhere(stage: Stage, there: Collector) -> None:
    text = (await stage.complete(PROMPT)).json()["choices"][0]["text"]
    # Held, so that decode cannot have ended by itself.
    gate = Gate(stage.decode, open_for=8)
    stopped = await stage.complete(PROMPT, ASKED, max_tokens=200, stop=text[1:3])
    assert stopped.json()["choices"][0]["finish_reason"] == "stop"
    gate.open()
    root = await whole(there, TRACE, "text_completion tiny", "attempt", "prefill_worker", "decode_worker")
    assert root.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    told = [span for span in there.spans if span.trace == TRACE]
    assert [span.name for span in told if "kvferry.cancelled" in span.attributes or span.error] == []


async def test_a_prompt_that_stays_on_the_decode_worker(tiny_llama_dir: Path, there: Collector) -> None:
    there.spans.clear()
    tracing = TracingConfig(endpoint=there.url, prompts=True, sample_ratio=1.0)
    async with http_stage(tiny_llama_dir, tracing=tracing, local_prefill="always") as stage:
        await stage.complete("a ferry", max_tokens=4)
        await came(there, lambda: there.named("decode_worker") and there.named("text_completion tiny"), "the trace")
    (root,) = there.named("text_completion tiny")
    assert "a ferry" in str(root.attributes["gen_ai.input.messages"])
    (attempt,) = there.named("attempt")
    assert attempt.attributes["kvferry.local_prefill"] == "always"
    (leg,) = there.named("decode_worker")
    assert [span.name for span in there.under(leg)] == ["queue", "prefill", "first_step", "decode"]
    assert [name for name, _, _ in there.named("prefill")[0].events][-1:] == ["chunk"]
    assert not there.named("prefill_worker")
