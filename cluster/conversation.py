"""``kvferry complete`` and ``kvferry chat``: the Python client, on a terminal."""

from __future__ import annotations

import importlib
import sys
import time
from contextlib import suppress
from typing import Any

import msgspec
from rich.console import Console

from cluster.state import StateStore
from protocol.errors import ClusterNotFound, InvalidRequest, KVFerryError
from router.client import Client, Timings, Usage


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
    """Address of the one cluster that is up on this machine.

    Raises:
        ClusterNotFound: there is none, or several; says what to do.
    """
    store = StateStore() if store is None else store
    names = store.names()
    if len(names) == 1 and (url := store.load(names[0]).url):
        return url
    if names:
        urls = ", ".join(f"{name}: {store.load(name).url or 'starting'}" for name in names)
        raise ClusterNotFound(f"say which cluster with --url ({urls})")
    raise ClusterNotFound("no cluster is up here; bring one up with: kvferry up FILE, or say where with --url")


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
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):
            importlib.import_module("readline")  # line editing and history for input()
        console.print("An empty line or Ctrl-D ends the chat; Ctrl-C stops an answer.", style="dim")
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if not line:
            return
        messages.append({"role": "user", "content": line})
        try:
            answer = show_stream(client, messages, **params)
        except KeyboardInterrupt:
            console.print("\n(stopped)", style="dim")
            messages.pop()
            continue
        except KVFerryError as error:
            console.print(f"{error.code}: {error.message}", markup=False)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer.text})


def given(**params: Any) -> dict[str, Any]:
    """The parameters that are not None."""
    return {name: value for name, value in params.items() if value is not None}


def chat_messages(message: str, system: str | None) -> list[dict[str, str]]:
    """The messages of a chat of one turn.

    Raises:
        InvalidRequest: the message is empty.
    """
    if not message.strip():
        raise InvalidRequest("the message is empty", field="message")
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": message}]
