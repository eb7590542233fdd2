"""``kvferry complete`` and ``kvferry chat``: the Python client, on a terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

import msgspec
from rich.console import Console

from cluster.state import StateStore
from protocol.errors import ClusterNotFound, KVFerryError
from router.client import Client, Timings, Usage

DEFAULT_URL = "http://127.0.0.1:8000"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that was shown while it came.

    Attributes:
        text: all of it.
        usage, timings: as the router reported them.
        first, last: seconds from the request to the first and to the last piece of text.
    """

    text: str
    usage: Usage | None
    timings: Timings | None
    first: float
    last: float

    @property
    def per_token(self) -> float | None:
        """Mean seconds between two tokens after the first; None where there was no second one."""
        tokens = self.usage.completion_tokens if self.usage is not None else 0
        return (self.last - self.first) / (tokens - 1) if tokens > 1 else None


def default_url(store: StateStore | None = None) -> str:
    """Address of the one cluster that is up on this machine, or :data:`DEFAULT_URL`."""
    store = StateStore() if store is None else store
    try:
        return store.load(store.only()).url or DEFAULT_URL
    except ClusterNotFound:
        return DEFAULT_URL


def show_stream(client: Client, prompt: Any, **params: Any) -> Answer:
    """Write an answer to standard output as it comes.

    Args:
        client: of the router.
        prompt: text, or the messages of a chat.
        params: further fields of the request.
    """
    begun = time.monotonic()
    pieces: list[str] = []
    first = last = 0.0
    usage: Usage | None = None
    timings: Timings | None = None
    with client.stream(prompt, timings=True, stream_options={"include_usage": True}, **params) as stream:
        for chunk in stream:
            usage, timings = chunk.usage or usage, chunk.timings or timings
            if chunk.text:
                last = time.monotonic() - begun
                first = first or last
                pieces.append(chunk.text)
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    return Answer(text="".join(pieces), usage=usage, timings=timings, first=first, last=last)


def converse(client: Client, console: Console, *, system: str | None, params: dict[str, Any]) -> None:
    """Chat until the input ends."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    console.print("An empty line or Ctrl-D ends the chat.", style="dim")
    while True:
        try:
            line = console.input("> ").strip()
        except EOFError:
            return
        if not line:
            return
        messages.append({"role": "user", "content": line})
        try:
            answer = show_stream(client, messages, **params)
        except KVFerryError as error:
            console.print(f"{error.code}: {error.message}", markup=False)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer.text})


def given(**params: Any) -> dict[str, Any]:
    """The parameters that are not None."""
    return {name: value for name, value in params.items() if value is not None}


def chat_messages(message: str, system: str | None) -> list[dict[str, str]]:
    """The messages of a chat of one turn."""
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": message}]
