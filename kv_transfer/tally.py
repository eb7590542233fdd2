"""Counts what the leases, or the imports, of one worker come to.

Life cycle of a key: opened -> granted (prefill) -> handed over (prefill) -> ended, exactly once -> released, at once or
after it has drained. What is not open changes nothing, so an event may be told more than once. All but the opening, the
grant and what the transport reports is read from what the books ask for.

It does no I/O and reads no clock; the counts are for metrics alone, and nothing is decided by them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kv_transfer.instructions import Commit, Failed, FreeBlocks, Instruction, Quarantine, Release, Send
from kv_transfer.transport import ShipReport
from protocol.histogram import Histogram, Observations
from protocol.ids import RequestKey
from protocol.messages import Abort, Handover, Refuse
from protocol.transfer_counts import SCALES, Outcome, PathCounts, TransferCounts

NO_TRANSPORT = "none"
"""Stands for the transport of a lease whose blocks went by none."""


@dataclass(slots=True)
class _Open:
    opened_at: float
    granted_at: float | None = None
    handed_over_at: float | None = None
    transport: str = NO_TRANSPORT


@dataclass(slots=True)
class _Path:
    observed: dict[str, Observations] = field(
        default_factory=lambda: {name: Observations(scale) for name, scale in SCALES.items()}
    )
    broken: Counter[str] = field(default_factory=Counter)


class Tally:
    """The counts of one worker's incarnation."""

    def __init__(self) -> None:
        self._open: dict[RequestKey, _Open] = {}
        self._draining: set[RequestKey] = set()
        self._opened = 0
        self._ended: Counter[Outcome] = Counter()
        self._refusals: Counter[str] = Counter()
        self._broken: Counter[str] = Counter()
        self._paths: dict[str, _Path] = {}

    def opened(self, key: RequestKey, now: float) -> None:
        """A lease or an import begins."""
        if key not in self._open:
            self._open[key] = _Open(now)
            self._opened += 1

    def granted(self, key: RequestKey, now: float) -> None:
        """A lease has its grant; the first word counts."""
        item = self._open.get(key)
        if item is not None and item.granted_at is None:
            item.granted_at = now

    def ships_by(self, key: RequestKey, transport: str) -> None:
        """A ship of a lease sets out."""
        if key in self._open:
            self._open[key].transport = transport

    def shipped(self, transport: str, report: ShipReport) -> None:
        """A ship of a lease, open or not, was acknowledged."""
        observed = self._path(transport).observed
        observed["ship_seconds"].add(report.seconds)
        observed["ship_bytes"].add(report.nbytes)
        observed["ship_spans"].add(report.spans)
        if report.seconds > 0.0:
            observed["ship_rate"].add(report.nbytes / report.seconds)

    def ship_broke(self, key: RequestKey, transport: str, code: str) -> None:
        """A ship failed; one of a lease that had ended was stopped on purpose, and does not count."""
        if key in self._open:
            self._path(transport or NO_TRANSPORT).broken[code] += 1

    def landing_broke(self, code: str) -> None:
        """A ship broke off while it landed here."""
        self._broken[code] += 1

    def asked(self, instructions: Iterable[Instruction], outcome: Outcome, now: float) -> None:
        """What a book asked for after one event.

        Args:
            instructions: all of them, in order.
            outcome: how whatever ends by this event ends.
            now: monotonic seconds.
        """
        ended: set[RequestKey] = set()
        for instruction in instructions:
            match instruction:
                case Quarantine(key):
                    ended.add(key)
                    self._end(key, outcome, now)
                    self._draining.add(key)
                case Release(key) | FreeBlocks(key):
                    ended.add(key)
                    self._end(key, outcome, now)
                    self._draining.discard(key)
                # An import that had no blocks yet gives none back.
                case Commit(key) | Failed(key) | Send(_, Abort(key=key)):
                    self._end(key, outcome, now)
                case Send(_, Handover(key=key)) if key in self._open:
                    self._open[key].handed_over_at = now
                # A lease that closes tells its reader so; any other refusal is an answer.
                case Send(_, Refuse(key=key, error=error)) if key not in ended:
                    self._refusals[error.code] += 1

    def counts(self) -> TransferCounts:
        """What there is so far."""
        return TransferCounts(
            opened=self._opened,
            ended=dict(self._ended),
            open=len(self._open),
            draining=len(self._draining),
            refusals=dict(self._refusals),
            broken=dict(self._broken),
            paths={name: _counts(path) for name, path in self._paths.items()},
        )

    def _end(self, key: RequestKey, outcome: Outcome, now: float) -> None:
        item = self._open.pop(key, None)
        if item is None:
            return
        self._ended[outcome] += 1
        if item.granted_at is not None:
            self._path(item.transport).observed["grant_wait"].add(item.granted_at - item.opened_at)
        if item.handed_over_at is not None and outcome == "settled":
            self._path(item.transport).observed["settle"].add(now - item.handed_over_at)

    def _path(self, transport: str) -> _Path:
        return self._paths.setdefault(transport, _Path())


def _counts(path: _Path) -> PathCounts:
    histograms: dict[str, Histogram] = {name: each.histogram() for name, each in path.observed.items()}
    return PathCounts(**histograms, broken=dict(path.broken))
