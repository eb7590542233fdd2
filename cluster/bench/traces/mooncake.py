"""Reads traces in Mooncake's public format: a line of JSON for each request.

``timestamp`` is in milliseconds, ``input_length`` and ``output_length`` are tokens, and ``hash_ids`` are ids of blocks
of 512 tokens of the prompt, equal where the block and all before it are. See Qin et al., Mooncake: Trading More Storage
for Less Computation, FAST 2025, and the folder FAST25-release/traces of its repository.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from cluster.bench.traces.options import MAX_LIMIT, TraceOptions
from cluster.bench.traces.request import BLOCK_TOKENS, TraceRequest, blocks_for
from protocol.errors import ConfigError

HASH_TOKENS = 512
PIECES = HASH_TOKENS // BLOCK_TOKENS
MAX_LINE = 1 << 20
"""Bytes; the longest of the published traces has a few kilobytes."""


class _Line(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def from_file(options: TraceOptions) -> Iterator[TraceRequest]:
    """The requests of the file that ``options.name`` names, in order; those that nobody can serve are cut.

    Raises:
        ConfigError: there is no such file, a line of it is none of this format (names it), or an option does not go
            with a file.
    """
    for name in ("prompt_tokens", "output_tokens", "burstiness", "rate_end"):
        if getattr(options, name) is not None:
            raise ConfigError(f"{name} does not go with a trace that is a file", field=name)
    lines = list(islice(_lines(Path(options.name)), options.requests))
    if not lines:
        raise ConfigError(f"{options.name} has no requests", field="trace")
    lines.sort(key=lambda line: line.timestamp)
    begin, end = lines[0].timestamp, lines[-1].timestamp
    scale = 1e-3
    if options.rate is not None:
        # As many requests lie between the first and the last as there are gaps.
        scale = (len(lines) - 1) / options.rate / (end - begin) if end > begin else 0.0
    return (
        _request(line, session, (line.timestamp - begin) * scale, options.max_tokens)
        for session, line in enumerate(lines)
    )


def _request(line: _Line, session: int, at: float, limit: int) -> TraceRequest:
    output = min(line.output_length, limit // 2)
    prompt = min(line.input_length, limit - output)
    pieces = (one * PIECES + piece for one in line.hash_ids for piece in range(PIECES))
    return TraceRequest(
        at=at,
        blocks=tuple(islice(pieces, blocks_for(prompt))),
        prompt_tokens=prompt,
        output_tokens=output,
        session=session,
    )


def _lines(file: Path) -> Iterator[_Line]:
    decoder = msgspec.json.Decoder(_Line)
    try:
        with file.open("rb") as stream:
            yield from _decoded(file, stream, decoder)
    except OSError as error:
        raise ConfigError(f"trace: cannot read {file}: {error.strerror}", field="trace") from error


def _decoded(file: Path, stream: io.BufferedReader, decoder: msgspec.json.Decoder[_Line]) -> Iterator[_Line]:
    number = 0
    while text := stream.readline(MAX_LINE):
        number += 1
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as error:
            raise ConfigError(f"trace: line {number} of {file}: {error}", field="trace") from error
        if line.input_length < 1 or line.output_length < 1:
            # The published traces have a few answers of no tokens: nobody is asked for such.
            continue
        if max(line.input_length, line.output_length) > MAX_LIMIT or line.timestamp < 0.0:
            raise ConfigError(f"trace: line {number} of {file}: a length or time out of range", field="trace")
        if len(line.hash_ids) < -(-line.input_length // HASH_TOKENS) or min(line.hash_ids) < 0:
            raise ConfigError(
                f"trace: line {number} of {file}: {len(line.hash_ids)} hash_ids for {line.input_length} tokens",
                field="trace",
            )
        yield line
