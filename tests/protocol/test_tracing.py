"""Spans on their way to a collector: what begins and goes on with a trace, what the environment says, what is lost."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from collector import Collector, collector, receiving
from pace import allowed

from protocol.errors import ConfigError
from protocol.ids import RequestKey
from protocol.tracing.config import TracingConfig
from protocol.tracing.legs import Legs

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ASKED = f"00-{TRACE}-{PARENT}-01"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with receiving(monkeypatch) as found:
        yield found
    assert not exporting()


def exporting() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("Otel", "tracing"))]


async def test_a_span_has_its_times_attributes_events_and_children(there: Collector) -> None:
    tracer = TracingConfig(endpoint=there.url, service_name="llm").open("prefill", "prefill-0@1")
    now = time.monotonic()
    first = tracer.enter("prefill_worker", now - 3.0, {"a": "b"}, traceparent=ASKED, tracestate="vendor=x")
    first.note("queue", now - 3.0, now - 2.0)
    first.note("prefill", now - 2.0, now - 1.0, {"kvferry.n": 7}, [("chunk", now - 1.5, {"tokens": 16})])
    follower = first.child("attempt", now, link=first)
    follower.fail("worker_lost", "gone")
    follower.end(now)
    first.fail("invalid_request", ours=False)
    first.end(now)
    await tracer.close()
    (whole,) = there.named("prefill_worker")
    assert (whole.trace, whole.parent, whole.kind) == (TRACE, PARENT, 2)
    assert whole.resource["service.name"] == "llm-prefill"
    assert whole.resource["service.instance.id"] == "prefill-0@1"
    assert whole.attributes == {"a": "b", "error.type": "invalid_request"}
    assert not whole.error, "what the client did wrong is no error of ours"
    queue, prefill, attempt = there.under(whole)
    assert [span.name for span in (queue, prefill, attempt)] == ["queue", "prefill", "attempt"]
    assert (attempt.error, attempt.status, attempt.links) == (True, "gone", [whole.span])
    assert prefill.attributes == {"kvferry.n": 7}
    assert [(name, about) for name, _, about in prefill.events] == [("chunk", {"tokens": 16})]
    assert abs(whole.start - (time.time_ns() - 3e9)) < 2e9
    assert (queue.end - queue.start) / 1e9 == pytest.approx(1.0, abs=1e-3)
    assert queue.end <= prefill.events[0][1] <= prefill.end <= attempt.start
    assert [path for path, _ in there.requests] == ["/v1/traces"] * len(there.requests)
    assert (tracer.exported, tracer.dropped) == (4, 0)


@pytest.mark.parametrize(
    "told",
    ["", "hello", ASKED.upper(), "00-" + "0" * 32 + f"-{PARENT}-01", "ff" + ASKED[2:], ASKED + "-x", ASKED + " " * 300],
)
async def test_what_is_no_traceparent_begins_a_trace_of_its_own(there: Collector, told: str) -> None:
    tracer = TracingConfig(endpoint=there.url + "/v1/traces").open("router", "router-0")
    tracer.enter("chat", time.monotonic(), traceparent=told, tracestate="," * 600).end(time.monotonic())
    await tracer.close()
    (span,) = there.spans
    assert span.trace != TRACE
    assert span.parent == ""


async def test_who_asks_says_whether_it_is_traced_and_else_the_ratio(there: Collector) -> None:
    tracer = TracingConfig(endpoint=there.url, sample_ratio=0.0).open("router", "router-0")
    now = time.monotonic()
    assert not tracer.enter("none", now).recorded
    assert not tracer.enter("none", now, traceparent=ASKED[:-1] + "0").recorded
    tracer.enter("one", now, traceparent=ASKED).end(now)
    await tracer.close()
    worker = TracingConfig(endpoint=there.url).open("decode", "decode-0")
    assert not worker.enter("none", now).recorded, "only a router begins a trace"
    await worker.close()
    assert [span.name for span in there.spans] == ["one"]


async def test_the_environment_is_heeded(there: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, said in {
        "OTEL_EXPORTER_OTLP_ENDPOINT": there.url,
        "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=ferry",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=pier",
        "OTEL_SERVICE_NAME": "by-hand",
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
    }.items():
        monkeypatch.setenv(name, said)
    tracer = TracingConfig().open("router", "router-0")
    now = time.monotonic()
    assert not tracer.enter("none", now).recorded
    tracer.enter("one", now, traceparent=ASKED).end(now)
    await tracer.close()
    (span,) = there.spans
    assert span.service == "by-hand"
    assert span.resource["deployment.environment.name"] == "pier"
    assert there.requests[0][1]["x-tenant"] == "ferry"


async def test_who_finds_the_queue_full_does_not_wait_and_is_counted(
    there: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "5")
    tracer = TracingConfig(endpoint=there.url).open("router", "router-0")
    there.held.clear()
    begun = time.monotonic()
    for _ in range(50):
        tracer.enter("chat", begun).end(begun)
    assert time.monotonic() - begun < allowed(5.0)
    there.wait(lambda: there.requests)
    assert tracer.dropped == 40
    there.held.set()
    there.wait(lambda: tracer.exported == 10)
    there.answer = 400
    tracer.enter("chat", begun).end(begun)
    there.wait(lambda: tracer.dropped == 41)
    await tracer.close()
    assert (tracer.exported, tracer.dropped, len(there.spans)) == (10, 41, 10)


async def test_a_collector_that_is_not_there_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.tracing.tracer.CLOSE_TIMEOUT", 0.2)
    with collector() as gone:
        url = gone.url
    tracer = TracingConfig(endpoint=url).open("router", "router-0")
    begun = time.monotonic()
    tracer.enter("chat", begun).end(begun)
    await tracer.close()
    assert time.monotonic() - begun < allowed(3.0)
    assert (tracer.exported, tracer.dropped) == (0, 1)
    assert not exporting()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"endpoint": "127.0.0.1:4318"}, "endpoint must be an http:// or https:// URL, got '127.0.0.1:4318'"),
        ({"endpoint": "http://"}, "endpoint"),
        ({"endpoint": "http://a:b"}, "endpoint"),
        ({"sample_ratio": 1.5}, "sample_ratio must be in \\[0, 1\\], got 1.5"),
        ({"sample_ratio": float("nan")}, "sample_ratio"),
    ],
)
def test_settings_that_will_not_do_are_named(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        TracingConfig(**fields)  # type: ignore[arg-type]


def test_variables_that_will_not_do_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "many")
    with pytest.raises(ConfigError, match=r"OTEL_ variables: .*many"):
        TracingConfig().open("router", "router-0")


def test_nothing_of_opentelemetry_is_imported_while_nothing_is_traced() -> None:
    program = (
        "import sys\n"
        "import router.server, router.request_trace, router.span_metrics\n"
        "import prefill_worker.trace, prefill_worker.config, decode_worker.trace, decode_worker.config\n"
        "from router.config import RouterConfig\n"
        "router.server.RouterServer(RouterConfig(model='m', tokenizer='t'))\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'google.protobuf', 'requests'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_a_leg_is_closed_once_the_worker_has_not_known_it_for_two_looks() -> None:
    known: set[RequestKey] = set()
    closed: list[str] = []
    legs: Legs[str] = Legs(lambda: known, closed.append)
    first, fork, other = (RequestKey(name, 0) for name in ("first", "fork", "other"))
    known |= {first, other}
    for key, carrier in ((first, None), (fork, first), (other, None)):
        legs.open(key, key.request_id, carrier)
    legs.open(first, "again")
    legs.look()
    legs.look()
    known.discard(first)
    legs.look()
    assert closed == []
    known.add(fork)
    legs.look()
    assert closed == ["first"], "the fork goes on without its carrier"
    known.clear()
    legs.look()
    known.add(other)
    legs.look()
    assert closed == ["first", "fork"]
    assert legs.find(other) == "other"
    legs.close(other)
    legs.close(other)
    assert closed == ["first", "fork", "other"]
