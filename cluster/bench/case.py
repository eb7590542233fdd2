"""What is measured: one point of the grid that the command's options span, and the grid."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, TypeVar

import msgspec

from kv_transfer.transport import SCHEMES
from protocol.errors import ConfigError, UnknownTransport
from protocol.layout import KVLayout

Table = Literal["contiguous", "scattered"]
Way = Literal["whole", "chunked"]
N = TypeVar("N", bound=str)

TABLES: tuple[Table, ...] = ("contiguous", "scattered")
WAYS: tuple[Way, ...] = ("whole", "chunked")

CHUNK_TOKENS = 512
"""Tokens of one ship call of a chunked transfer: the default chunk of a prefill worker."""
UCX_HELD: Mapping[str, str] = MappingProxyType({"ucx:tcp": "tcp", "ucx:shm": "shm"})
"""``UCX_TLS`` of the cases in which UCX has no choice."""
MAX_TOKENS = 128 << 10
MAX_CONCURRENCY = 256
SCATTER = 2
"""Scattered block tables are drawn from a pool this many times as large as they need."""
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to measure.

    Attributes:
        transport: scheme of the transport, for ``ucx`` with what UCX is held to (``ucx:tcp``).
        tokens: of each transfer.
        table: whether the block ids of a transfer are neighbours or drawn at random, on both sides.
        way: one ship call per transfer, or one for every :data:`CHUNK_TOKENS` tokens, one after the other.
        concurrency: transfers at once.
    """

    transport: str
    tokens: int
    table: Table
    way: Way
    concurrency: int

    @property
    def scheme(self) -> str:
        """Of the transport."""
        return self.transport.partition(":")[0]

    @property
    def ucx_tls(self) -> str:
        """What UCX may go by; empty leaves it to UCX."""
        return UCX_HELD.get(self.transport, "")

    def blocks(self, layout: KVLayout) -> int:
        """Blocks of each transfer."""
        return layout.blocks_for(self.tokens)

    def pool_blocks(self, layout: KVLayout) -> int:
        """Blocks that a pool needs for it."""
        return self.blocks(layout) * self.concurrency * (SCATTER if self.table == "scattered" else 1)

    def __str__(self) -> str:
        return f"{self.transport}, {self.tokens} tokens, {self.table}, {self.way}, {self.concurrency} at once"


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """Every combination of these is a case, but chunked ones that would be one chunk.

    Raises:
        ConfigError: a list is empty or a value is out of range; names the field and the value.
        UnknownTransport: no such transport; lists the known ones.
    """

    transports: tuple[str, ...]
    tokens: tuple[int, ...]
    tables: tuple[Table, ...]
    ways: tuple[Way, ...]
    concurrency: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name):
                raise ConfigError(f"{name} must name at least one value", field=name)
        for name, values, limit in (
            ("tokens", self.tokens, MAX_TOKENS),
            ("concurrency", self.concurrency, MAX_CONCURRENCY),
        ):
            wrong = [value for value in values if not 1 <= value <= limit]
            if wrong:
                raise ConfigError(f"{name} must lie in [1, {limit}], got {wrong[0]}", field=name)
        for scheme in self.transports:
            if scheme not in SCHEMES and scheme not in UCX_HELD:
                known = ", ".join(sorted((*SCHEMES, *UCX_HELD)))
                raise UnknownTransport(f"no transport {scheme!r}; known: {known}", field="transports")

    def cases(self) -> list[Case]:
        """The cases, in the order of the options, each once."""
        points = itertools.product(self.transports, self.tokens, self.tables, self.ways, self.concurrency)
        found = [
            Case(transport=transport, tokens=tokens, table=table, way=way, concurrency=concurrency)
            for transport, tokens, table, way, concurrency in points
            if way == "whole" or tokens > CHUNK_TOKENS or "whole" not in self.ways
        ]
        return list(dict.fromkeys(found))


def parse_count(text: str, *, field: str) -> int:
    """A number with an optional binary unit: ``"4096"``, ``"128k"``, ``"2GiB"``.

    Raises:
        ConfigError: it is none.
    """
    found = re.fullmatch(r"(\d{1,15})\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if not found:
        raise ConfigError(f"{field} must be a number such as 512, 4k or 2GiB, got {text!r}", field=field)
    return int(found[1]) * UNITS[found[2]]


def parse_counts(text: str, *, field: str) -> tuple[int, ...]:
    """Numbers parted by commas; raises as :func:`parse_count`."""
    return tuple(parse_count(part, field=field) for part in text.split(","))


def parse_choices(text: str, known: Sequence[N], *, field: str) -> tuple[N, ...]:
    """Names parted by commas; ``all`` stands for every known one.

    Raises:
        ConfigError: one is not known; lists those that are.
    """
    if text.strip() == "all":
        return tuple(known)
    by_name: dict[str, N] = {name: name for name in known}
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in by_name:
            raise ConfigError(f"{field} must be of {', '.join(known)}, got {name!r}", field=field)
    return tuple(by_name[name] for name in names)


def pool_blocks(cases: Sequence[Case], layout: KVLayout, *, limit: int) -> int:
    """Blocks of a pool that is large enough for every case.

    Raises:
        ConfigError: it would take more than ``limit`` bytes; names the case.
    """
    largest = max(cases, key=lambda case: case.pool_blocks(layout))
    blocks = largest.pool_blocks(layout)
    if layout.pool_bytes(blocks) > limit:
        needed = f"{layout.pool_bytes(blocks) / (1 << 20):.0f} MiB"
        raise ConfigError(
            f"{largest.concurrency} x {largest.tokens} tokens, {largest.table}, need a pool of {needed} on either "
            f"side, more than --max-pool allows ({limit / (1 << 20):.0f} MiB)",
            field="max_pool",
        )
    return blocks
