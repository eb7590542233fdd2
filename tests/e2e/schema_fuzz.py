"""Requests of every shape that a router's OpenAPI document allows, and of others, drawn in a process of their own.

Drawing takes memory that nobody gives back, which what is served must not be blamed for. The last line printed is how
many answers of each path were right and no refusals, as JSON. The first one that is not as the document says ends it.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

import msgspec
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
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
UNDECIDED = ("temperature", "top_p", "top_k", "min_p", "min_tokens", "repetition_penalty", "best_of", "max_tokens", "n")
"""Fields that the document bounds by their type alone."""


def sensible(body: dict[str, Any], path: str, chance: int, model: str) -> dict[str, Any]:
    """``body`` nearer to what is served: at random hardly any would be."""
    near = {name: value for name, value in body.items() if name not in UNDECIDED} | {"model": model}
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


def fuzz(url: str, model: str, examples: int, *, same: bool) -> Counter[str]:
    served: Counter[str] = Counter()
    with requests.Session() as session:
        session.trust_env = False

        def ask(case: Any, chance: int) -> None:
            path = case.operation.path
            if chance % 4 and isinstance(case.body, dict):
                case.body = sensible(case.body, path, chance, model)
            answer = case.call(base_url=url, session=session, timeout=PATIENCE)
            assert answer.status_code != 500, answer.text
            case.validate_response(answer, checks=CHECKS)
            if answer.status_code == 200:
                served[path] += 1
                if answer.headers["content-type"][0].startswith("text/event-stream"):
                    check_events(path, answer.text)

        document = schemathesis.openapi.from_dict(session.get(f"{url}/openapi.json").json())
        for path, chunk in ENDLESS.items():
            with session.get(f"{url}{path}", stream=True, timeout=PATIENCE) as answer:
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
                    derandomize=same,
                )
                @given(operation.as_strategy(generation_mode=mode), st.integers(0, 999))
                def check(case: Any, chance: int) -> None:
                    ask(case, chance)

                check()
    return served


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("url", help="of the router")
    asked.add_argument("model", help="that it serves")
    asked.add_argument("--examples", type=int, required=True, help="of each operation with a body, and each mode")
    asked.add_argument("--same", action="store_true", help="each time")
    options = asked.parse_args()
    print(json.dumps(fuzz(options.url, options.model, options.examples, same=options.same)))


if __name__ == "__main__":
    main()
