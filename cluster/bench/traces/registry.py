"""Traces by name, or by the path of a file."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from cluster.bench.traces.conversation import synthetic
from cluster.bench.traces.kind import KINDS
from cluster.bench.traces.mooncake import from_file
from cluster.bench.traces.options import TraceOptions
from cluster.bench.traces.request import TraceRequest
from protocol.errors import ConfigError


def stream_trace(options: TraceOptions) -> Iterator[TraceRequest]:
    """The requests one by one, by their times: a million of them need no room. What is wrong is said at once.

    Raises:
        ConfigError: no such trace (names those there are), or as :func:`synthetic` and :func:`from_file`.
    """
    kind = KINDS.get(options.name)
    if kind is not None:
        return islice(synthetic(kind, options), options.requests)
    if Path(options.name).is_file():
        return from_file(options)
    raise ConfigError(f"trace must be of {', '.join(KINDS)}, or a file, got {options.name!r}", field="trace")


def make_trace(
    name: str, *, requests: int, rate: float | None = None, seed: int = 0, **shape: Any
) -> list[TraceRequest]:
    """All requests of a trace, by their times; see :class:`TraceOptions` for ``shape``, and :func:`stream_trace`."""
    return list(stream_trace(TraceOptions(name=name, requests=requests, rate=rate, seed=seed, **shape)))
