"""The part of the client that does no I/O: requests, events, retries."""

from __future__ import annotations

import random
import ssl
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from protocol.errors import (
    ConfigError,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidRequest,
    KVFerryError,
    MalformedFrame,
)
from router.client.lines import Lines
from router.client.results import Chunk, chunk_of

Prompt = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
Messages = Sequence[Mapping[str, Any]]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MODELS = "/v1/models"
HEALTH = "/health"
EXPLAIN = "/explain/"
CLUSTER = "/cluster"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"

RETRIED_STATUSES = frozenset({429, 503})
MAX_PAUSE = 10.0
"""Seconds between two tries at most, whatever the router asks for."""
DONE = "[DONE]"


@dataclass(frozen=True)
class RetryPolicy:
    """When a request is tried again: only while nothing of an answer has come.

    Attributes:
        retries: tries after the first.
        backoff: seconds before the second try, doubled for each further one; 0 never waits.

    Raises:
        ConfigError: a value is outside its range; names the field and the value.
    """

    retries: int = 2
    backoff: float = 0.25

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ConfigError(f"retries must be at least 0, got {self.retries}", field="retries")
        if not self.backoff >= 0:
            raise ConfigError(f"backoff must be at least 0, got {self.backoff}", field="backoff")

    def pause(self, tried: int, retry_after: str | None = None) -> float:
        """Seconds to wait after the ``tried``-th try, counted from 1."""
        # Chance parts clients that failed together.
        own = self.backoff * 2 ** (tried - 1) * (0.5 + random.random())  # noqa: S311 -- no secret
        try:
            asked = float(retry_after) if retry_after else 0.0
        except ValueError:  # the header's other form, a date
            asked = 0.0
        return min(max(own, asked), MAX_PAUSE) if self.backoff else 0.0


def root_url(url: str) -> str:
    """The router's own address in a URL that may be the one of its OpenAI API, as other clients want it."""
    return url.rstrip("/").removesuffix("/v1")


def completion_body(prompt: Prompt, model: str, params: Mapping[str, Any]) -> bytes:
    """The JSON of a completion request."""
    return _body({"model": model, "prompt": prompt, **params})


def chat_body(messages: Messages, model: str, params: Mapping[str, Any]) -> bytes:
    """The JSON of a chat request."""
    return _body({"model": model, "messages": messages, **params})


def stream_request(prompt: Prompt | Messages, model: str, params: Mapping[str, Any]) -> tuple[str, bytes]:
    """``(path, JSON)`` of a stream; a list of mappings is a chat, anything else a prompt."""
    options = {"stream": True, "stream_options": {"include_usage": True}, **params}
    if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
        return CHAT, _body({"model": model, "messages": prompt, **options})
    return COMPLETIONS, _body({"model": model, "prompt": prompt, **options})


def tokenize_body(text: str | Messages, fields: Mapping[str, Any]) -> bytes:
    """The JSON of a tokenize request, of a prompt or a chat."""
    return _body({"prompt" if isinstance(text, str) else "messages": text, **fields})


def detokenize_body(token_ids: Sequence[int], model: str | None) -> bytes:
    """The JSON of a detokenize request."""
    return _body({"tokens": token_ids, "model": model})


def _body(fields: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode({name: value for name, value in fields.items() if value is not None})
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the request is not valid Unicode text: {error}") from error


def client_trust(ca_file: str | None) -> ssl.SSLContext | bool:
    """Whose word is taken for a router that speaks TLS, as httpx wants it.

    Raises:
        ConfigError: ``ca_file`` cannot be read.
    """
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ca_file {ca_file} cannot be used: {error}", field="ca_file") from error


def client_headers(api_key: str | None) -> dict[str, str]:
    """Headers of every request.

    Raises:
        ConfigError: the key has characters that no header can carry.
    """
    if api_key is None:
        return {}
    if not api_key.isascii() or not api_key.isprintable() or not api_key.strip():
        raise ConfigError("api_key must be printable ASCII characters", field="api_key")
    return {"authorization": f"Bearer {api_key}"}


def request_headers(*, timings: bool, request_id: str | None) -> dict[str, str]:
    """Headers of a request that generates."""
    headers = {"content-type": "application/json"}
    if timings:
        headers["x-kvferry-timings"] = "1"
    if request_id is not None:
        headers["x-request-id"] = request_id
    return headers


def connection_error(error: httpx.HTTPError, base_url: str) -> KVFerryError:
    """The error of ours for one of the HTTP library."""
    reason = str(error) or type(error).__name__
    if isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout):
        return DeadlineExceeded(f"the router at {base_url} did not answer in time: {reason}")
    return ConnectionFailed(f"no answer from the router at {base_url}: {reason}")


def may_retry(error: httpx.HTTPError) -> bool:
    """Whether ``error`` came before anything was sent."""
    return isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)


class EventReader:
    """Bytes of a stream of server-sent events to chunks.

    Life cycle: :meth:`push` for each piece; :meth:`finish` when there are no more. ``done`` is set by the end mark.

    Raises:
        KVFerryError: from :meth:`push`, the error that the router sent in mid-answer.
    """

    def __init__(self) -> None:
        self.done = False
        self._lines = Lines()

    def push(self, data: bytes) -> Iterator[Chunk]:
        """The chunks that are whole with ``data``."""
        for line in self._lines.push(data):
            chunk = self._chunk(line)
            if chunk is not None:
                yield chunk

    def _chunk(self, line: str) -> Chunk | None:
        if self.done or not line.startswith("data:"):
            return None
        data = line[5:].strip()
        if data == DONE:
            self.done = True
            return None
        return chunk_of(data)

    def finish(self) -> None:
        """Check that the stream ended as it should.

        Raises:
            ConnectionFailed: it ended before its end mark.
        """
        if not self.done:
            raise ConnectionFailed("the stream ended before the answer did")


def first_model(names: Iterable[str]) -> str:
    """The model that is used where the caller names none.

    Raises:
        MalformedFrame: the router serves none.
    """
    for name in names:
        return name
    raise MalformedFrame("the router names no model")
