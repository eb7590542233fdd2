"""Requests of every shape that the OpenAPI document allows, and of others, to a router with workers behind it.

No answer says that something broke inside, each is one that the document tells of, and nothing is left behind.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import requests
import schemathesis
from http_stage import MODEL, http_stage
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rack import until
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from router.front.answer_schema import ChatChunk, CompletionChunk, ErrorAnswer
from router.front.openapi import EVENTS, OPERATIONS

CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    allow_header_conformance,
]
PATIENCE = 60.0
ENDLESS = {operation.path: operation.chunk for operation in OPERATIONS if operation.kind == EVENTS}
"""What is asked for by itself: nobody could read it to its end."""
GENERATING = ("/v1/chat/completions", "/v1/completions")
UNDECIDED = ("temperature", "top_p", "top_k", "min_p", "min_tokens", "repetition_penalty", "best_of", "max_tokens", "n")
"""Fields that the document bounds by their type alone."""


def sensible(body: dict[str, Any], path: str, chance: int) -> dict[str, Any]:
    """``body`` nearer to what is served: at random hardly any would be."""
    near = {name: value for name, value in body.items() if name not in UNDECIDED} | {"model": MODEL}
    if path == "/tokenize":
        near.pop("messages", None)
        near["prompt"] = "the ferry"
    if isinstance(near.get("tokens"), list):
        near["tokens"] = [token % 256 if isinstance(token, int) else token for token in near["tokens"]]
    if not path.startswith("/v1"):
        return near
    if isinstance(near.get("messages"), list):
        contents = [turn.get("content") if isinstance(turn, dict) else turn for turn in near["messages"][:2]]
        near["messages"] = [{"role": "user", "content": str(content)[:9]} for content in contents]
    else:
        near["prompt"] = [5, 6]
    # Two fields are left as they were drawn.
    drawn = sorted(set(near) - {"model", "messages", "prompt", "stream"})
    for name in drawn:
        if (drawn.index(name) - chance) % len(drawn) > 1:
            del near[name]
    return near | {"max_tokens": 3}


def check_events(path: str, text: str) -> None:
    """Check the events of a stream, which the document cannot tell of."""
    chunk = ChatChunk if path == "/v1/chat/completions" else CompletionChunk
    *events, end = [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]
    for event in events:
        msgspec.json.decode(event, type=chunk)
    if end != "[DONE]":
        msgspec.json.decode(end, type=ErrorAnswer)


async def test_whatever_is_asked_is_answered_as_the_document_says(
    tiny_llama_dir: Path, request: pytest.FixtureRequest
) -> None:
    examples = request.config.getoption("fuzz_examples")
    async with http_stage(tiny_llama_dir, max_model_len=48) as stage:
        served: Counter[str] = Counter()

        def ask(session: requests.Session, case: Any, chance: int) -> None:
            path = case.operation.path
            if chance % 4 and isinstance(case.body, dict):
                case.body = sensible(case.body, path, chance)
            answer = case.call(base_url=stage.url, session=session, timeout=PATIENCE)
            assert answer.status_code != 500, answer.text
            case.validate_response(answer, checks=CHECKS)
            if answer.status_code == 200:
                served[path] += 1
                if answer.headers["content-type"][0].startswith("text/event-stream"):
                    check_events(path, answer.text)

        def fuzz() -> None:
            with requests.Session() as session:
                session.trust_env = False
                document = schemathesis.openapi.from_dict(session.get(f"{stage.url}/openapi.json").json())
                for path, chunk in ENDLESS.items():
                    with session.get(f"{stage.url}{path}", stream=True, timeout=PATIENCE) as answer:
                        assert answer.headers["content-type"].startswith(EVENTS)
                        event = next(answer.iter_lines())
                        msgspec.json.decode(event.removeprefix(b"data: "), type=chunk)
                for found in document.get_all_operations():
                    operation = found.ok()
                    if operation.path in ENDLESS:
                        continue
                    has_body = bool(operation.body)
                    for mode in GenerationMode if has_body else (GenerationMode.POSITIVE,):

                        @settings(
                            max_examples=examples if has_body else 2,
                            deadline=None,
                            suppress_health_check=list(HealthCheck),
                            database=None,
                        )
                        @given(operation.as_strategy(generation_mode=mode), st.integers(0, 999))
                        def check(case: Any, chance: int) -> None:
                            ask(session, case, chance)

                        check()

        before = psutil.Process().memory_info().rss
        await asyncio.to_thread(fuzz)
        assert psutil.Process().memory_info().rss - before < 256 << 20
        # If none had come so far as the workers, this would say nothing of them.
        assert any(served[path] for path in GENERATING)
        await until(lambda: stage.prefill.load().running == 0, "idle workers")
        assert (await stage.complete("a")).json()["choices"]
