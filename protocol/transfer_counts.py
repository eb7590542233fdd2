"""What a worker counts of its handoffs, from the start of its incarnation; it travels in heartbeats."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal, TypeVar

import msgspec

from protocol.errors import ConfigError
from protocol.histogram import BYTES, BYTES_PER_SECOND, SECONDS, SPANS, Histogram, Scale

MAX_PATHS = 16
MAX_CODES = 64

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Code = Annotated[str, msgspec.Meta(max_length=64)]
_Scheme = Annotated[str, msgspec.Meta(max_length=32)]
_K = TypeVar("_K", bound=str)

Outcome = Literal["settled", "expired", "refused", "cancelled", "aborted", "broken", "failed", "lost"]
"""How a lease or an import ended:

* settled: decode committed the blocks.
* expired: the other side gave no sign for too long.
* refused: the prefill worker had no such lease, or closed it (imports).
* cancelled: the attempt was over: its client left, or its first token was its last.
* aborted: the reader did not want the blocks any more (leases).
* broken: a ship failed, or what landed was not what was granted.
* failed: this worker could not go on with the request, or gave it back to make room.
* lost: the other side's process was replaced by a new one.
"""

SCALES: Mapping[str, Scale] = MappingProxyType(
    {
        "grant_wait": SECONDS,
        "ship_seconds": SECONDS,
        "ship_bytes": BYTES,
        "ship_spans": SPANS,
        "ship_rate": BYTES_PER_SECOND,
        "settle": SECONDS,
    }
)
"""The buckets of each histogram of :class:`PathCounts`."""


class PathCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What went by one transport, on the prefill side.

    Attributes:
        grant_wait: seconds from the opening of a lease to its grant, once the lease has ended.
        ship_seconds: from the call to the last acknowledgement, per ship.
        ship_bytes, ship_spans: of each ship.
        ship_rate: bytes per second of each ship.
        settle: seconds from the hand-over record to the reader's settlement.
        broken: ships that failed while their lease was open, by error code.

    Raises:
        ConfigError: a histogram has other buckets than its scale; names it.
    """

    grant_wait: Histogram = Histogram()
    ship_seconds: Histogram = Histogram()
    ship_bytes: Histogram = Histogram()
    ship_spans: Histogram = Histogram()
    ship_rate: Histogram = Histogram()
    settle: Histogram = Histogram()
    broken: Annotated[dict[_Code, _Count], msgspec.Meta(max_length=MAX_CODES)] = {}

    def __post_init__(self) -> None:
        for name, scale in SCALES.items():
            histogram: Histogram = getattr(self, name)
            if not histogram.fits(scale):
                wanted, got = len(scale.bounds) + 1, len(histogram.counts)
                raise ConfigError(f"{name} must have {wanted} buckets, or none, got {got}", field=name)

    def plus(self, other: PathCounts) -> PathCounts:
        """The sum of both."""
        histograms = {name: getattr(self, name).plus(getattr(other, name)) for name in SCALES}
        return PathCounts(**histograms, broken=added(self.broken, other.broken))


class TransferCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one worker counts of its leases (prefill) or imports (decode).

    ``opened`` is ``open`` and everything in ``ended`` together; what drains has ended.

    Attributes:
        opened: leases that were opened, or imports that began to wait or were granted.
        ended: by outcome.
        open: right now, without those that drain.
        draining: ended, and the transport may still touch their blocks.
        refusals: grants and renewals that were refused since there was no lease for them, by error code (prefill).
        broken: ships that broke off while they landed, by error code (decode).
        paths: by URI scheme; "none" where every block was at decode already, or none got there (prefill).
    """

    opened: _Count = 0
    ended: dict[Outcome, _Count] = {}
    open: _Count = 0
    draining: _Count = 0
    refusals: Annotated[dict[_Code, _Count], msgspec.Meta(max_length=MAX_CODES)] = {}
    broken: Annotated[dict[_Code, _Count], msgspec.Meta(max_length=MAX_CODES)] = {}
    paths: Annotated[dict[_Scheme, PathCounts], msgspec.Meta(max_length=MAX_PATHS)] = {}

    def plus(self, later: TransferCounts) -> TransferCounts:
        """The sum with a later incarnation's; what is open and drains is the later one's."""
        paths = {
            name: self.paths.get(name, PathCounts()).plus(later.paths.get(name, PathCounts()))
            for name in self.paths.keys() | later.paths.keys()
        }
        return TransferCounts(
            opened=self.opened + later.opened,
            ended=added(self.ended, later.ended),
            open=later.open,
            draining=later.draining,
            refusals=added(self.refusals, later.refusals),
            broken=added(self.broken, later.broken),
            paths=paths,
        )


def added(one: Mapping[_K, int], other: Mapping[_K, int]) -> dict[_K, int]:
    """Two tables of counts, key by key."""
    return {key: one.get(key, 0) + other.get(key, 0) for key in one.keys() | other.keys()}
