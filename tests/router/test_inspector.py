"""Clients' grammars are looked at in a process that is ended when one takes too long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from pace import allowed
from scripted_workers import fleet_at, until
from test_server import routing, tokenizer_dir
from worker_facts import MODEL

from protocol.errors import InvalidRequest, Overloaded, UnsupportedField
from protocol.grammar import Grammar
from router.front import inspector as inspector_module
from router.front.inspector import Inspector

__all__ = ["tokenizer_dir"]

GOOD = Grammar("regex", "[a-z]+")
ENDLESS = Grammar("json_schema", '{"type":"integer","multipleOf":9999991}')


@pytest.fixture
async def inspector(tokenizer_dir: Path) -> AsyncIterator[Inspector]:
    before = {process.pid for process in psutil.Process().children()}
    made = Inspector(tokenizer_dir / "tokenizer.json", 1000)
    yield made
    await made.close()
    assert {process.pid for process in psutil.Process().children()} <= before


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar("regex", "(a"), "unclosed group"),
        (Grammar("json_schema", '{"type": "objectt"}'), "objectt"),
        (Grammar("json_schema", "{not json"), "cannot be used"),
        (Grammar("json_schema", '{"a":' * 400 + "1" + "}" * 400), "recursion"),
        (Grammar("lark", "no grammar"), "cannot be used"),
        (Grammar("regex", "(a{1000}){1000}"), "too many expressions"),
        (Grammar("json_schema", '{"$ref": "#"}'), "no text fits it"),
        (Grammar("lark", "start: a\na: b\nb: a"), "no text fits it"),
        (Grammar("regex", r"[^\s\S]"), "no text fits it"),
    ],
)
async def test_what_cannot_be_used_is_named_and_the_next_one_is_looked_at(
    inspector: Inspector, grammar: Grammar, says: str
) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=says) as caught:
            await inspector.check(grammar, "guided_regex")
        assert caught.value.field == "guided_regex"
        assert caught.value.message.startswith("guided_regex cannot be used: ")
        await inspector.check(GOOD, "guided_regex")


async def test_one_that_never_ends_holds_nobody_up_for_long(
    inspector: Inspector, monkeypatch: pytest.MonkeyPatch
) -> None:
    await inspector.check(GOOD, "f")
    monkeypatch.setattr(inspector_module, "DEADLINE", 0.5)
    begun = time.monotonic()
    with pytest.raises(InvalidRequest, match="takes too long"):
        await inspector.check(ENDLESS, "f")
    took = time.monotonic() - begun
    monkeypatch.undo()
    await inspector.check(Grammar("regex", "other"), "f")
    # And once known it is refused at once.
    begun = time.monotonic()
    with pytest.raises(InvalidRequest, match="takes too long"):
        await inspector.check(ENDLESS, "f")
    assert time.monotonic() - begun < allowed(took)


async def test_a_client_that_leaves_takes_no_answer_of_another(inspector: Inspector) -> None:
    await inspector.check(GOOD, "f")
    leaving = asyncio.create_task(inspector.check(ENDLESS, "f"))
    await until(lambda: inspector._turn.locked())
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await inspector.check(Grammar("regex", "another"), "f")
    with pytest.raises(InvalidRequest):
        await inspector.check(Grammar("regex", "(b"), "f")


async def test_a_process_that_dies_is_started_again(inspector: Inspector) -> None:
    await inspector.check(GOOD, "f")
    assert inspector._process is not None
    inspector._process.kill()
    with pytest.raises(InvalidRequest, match="cannot be compiled"):
        await inspector.check(Grammar("regex", "x1"), "f")
    await inspector.check(Grammar("regex", "x2"), "f")


async def test_there_is_a_bound_on_who_waits_and_on_what_is_known(
    inspector: Inspector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspector_module, "LONGEST_QUEUE", 3)
    monkeypatch.setattr(inspector_module, "KNOWN_BYTES", 10)
    checks = [inspector.check(Grammar("regex", f"queued{number}"), "f") for number in range(5)]
    ends = await asyncio.gather(*checks, return_exceptions=True)
    assert [type(end) for end in ends] == [type(None)] * 3 + [Overloaded] * 2
    assert len(inspector._known) == 1


async def test_a_tokenizer_that_will_not_do_is_named(tmp_path: Path) -> None:
    inspector = Inspector(tmp_path / "tokenizer.json", 1000)
    with pytest.raises(UnsupportedField, match=r"tokenizer\.json"):
        await inspector.check(GOOD, "f")
    await inspector.close()


async def test_over_http_and_nothing_is_left_of_it(tokenizer_dir: Path) -> None:
    def asking(**fields: Any) -> dict[str, Any]:
        return {"model": MODEL, "prompt": "the ferry", "max_tokens": 4, **fields}

    before = {process.pid for process in psutil.Process().children()}
    async with (
        routing(tokenizer_dir) as server,
        fleet_at(server.hub_endpoint) as fleet,
        httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60.0) as client,
    ):
        prefill = fleet.add("prefill", "p0")
        fleet.add("decode", "d0")
        await until(lambda: server.service.health().ready)
        good = await client.post("/v1/completions", json=asking(structured_outputs={"choice": ["yes", "no"]}))
        assert good.status_code == 200
        assert prefill.opened[0].sampling.grammar == Grammar("lark", 'start: "yes" | "no"')
        bad = await client.post("/v1/completions", json=asking(guided_regex="(a"))
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "guided_regex")
        assert "unclosed group" in bad.json()["error"]["message"]
        assert len(prefill.opened) == 1
    assert {process.pid for process in psutil.Process().children()} <= before
