"""What blocks take from one worker to another: by the links that workers tell of, and by what ships took lately.

A worker tells how fast its network is, so the first blocks of all are reckoned with at no more than the slower end's
speed. What landed at a worker, as its heartbeats have it, counts against that, and what this router saw of a pair
against both: the more of it the more bytes it was, and less and less as time goes by, for links change.

Life cycle of a row: told of each heartbeat of its worker, of each ship and of what is sent, and forgotten with it.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from protocol.messages import WorkerLoad, WorkerProfile

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
Number = TypeVar("Number", float, Floats)

ASSUMED = 1e9
"""Bytes per second where nothing is known, and between workers of one host."""
FADE = 30.0
"""Seconds in which what was measured fades to a third."""
WEIGHT = float(8 << 20)
"""Bytes that what is expected of a link counts as beside those that crossed it."""
FORGOTTEN = 4 * FADE
"""Seconds after which the slowest pair is not heeded any more."""
ANYWHERE = -1
"""Stands for the host of a worker that only those of its own host can reach."""
_COLUMNS = ("told", "token_bytes", "nbytes", "seconds", "heard", "pace", "until")


@dataclass(slots=True)
class LinkEnd:
    """One worker's end in plain numbers, which are the columns' as well: see :class:`Links`."""

    told: float = 0.0
    token_bytes: float = 0.0
    nbytes: float = 0.0
    seconds: float = 0.0
    heard: float = 0.0
    pace: float = 0.0
    until: float = 0.0
    host: int = ANYWHERE


class _Table(NamedTuple):
    """What of all pairs of some rows changes only with the workers there, as the arrays of these rows do.

    Attributes:
        partners, rows: of decode and prefill workers.
        told: seconds of a byte by what both ends tell.
        places: of the pairs in what is kept by pair.
    """

    partners: Rows
    rows: Rows
    told: Floats
    places: Rows


class Links:
    """By row of the fleet; pairs by the row of the decode worker and that of the prefill worker.

    Attributes:
        ends: by row, the same numbers for who looks at few of them; each is written in both places.
        told: seconds of a byte, by its own word; 0 where it tells nothing.
        token_bytes: bytes of a token's K and V.
        nbytes, seconds, heard: what landed there and how long that took, as of its last heartbeat; it fades.
        pace: seconds of a byte there, whoever it comes from; 0 of a row that was not heard of.
        until: when it has carried all that this router has sent over it, as that was predicted.
    """

    told: Floats
    token_bytes: Floats
    nbytes: Floats
    seconds: Floats
    heard: Floats
    pace: Floats
    until: Floats

    def __init__(self, rows: int) -> None:
        for name in _COLUMNS:
            setattr(self, name, np.zeros(rows))
        self.ends = [LinkEnd() for _ in range(rows)]
        self._host: Rows = np.full(rows, ANYWHERE, dtype=np.int64)
        self._several = False
        # Pages of zeros cost nothing until a pair is written.
        self._pair_bytes, self._pair_seconds = (np.zeros((rows, rows), np.float32) for _ in range(2))
        self._pair_heard = np.zeros((rows, rows))
        # The slowest end; None where it is to be looked for anew. Of pairs the slowest that was measured, and when.
        self._slowest_end: float | None = 0.0
        self._slowest, self._slowest_at = 0.0, -math.inf
        self._latest = -math.inf
        self._table: _Table | None = None

    def grow(self, rows: int) -> None:
        """There are more rows."""
        more = rows - len(self.told)
        self._table = None
        self.ends += [LinkEnd() for _ in range(more)]
        for name in _COLUMNS:
            setattr(self, name, np.concatenate((getattr(self, name), np.zeros(more))))
        self._host = np.concatenate((self._host, np.full(more, ANYWHERE, dtype=np.int64)))
        for name in ("_pair_bytes", "_pair_seconds", "_pair_heard"):
            before = getattr(self, name)
            grown = np.zeros((rows, rows), before.dtype)
            grown[: len(before), : len(before)] = before
            setattr(self, name, grown)

    def forget(self, row: int, now: float) -> None:
        """A row is another worker's, or another life's."""
        end = self.ends[row]
        end.nbytes = end.seconds = self.nbytes[row] = self.seconds[row] = 0.0
        end.heard = end.until = self.heard[row] = self.until[row] = now
        self._pair_bytes[row] = self._pair_seconds[row] = 0.0
        self._pair_bytes[:, row] = self._pair_seconds[:, row] = 0.0

    def know(self, row: int, profile: WorkerProfile) -> None:
        """A worker is what its profile says."""
        layout, end = profile.layout, self.ends[row]
        self._table = self._slowest_end = None
        end.token_bytes = self.token_bytes[row] = layout.block_bytes / layout.block_size
        end.told = self.told[row] = 1.0 / profile.link_rate if profile.link_rate > 0.0 else 0.0
        end.host = self._host[row] = _host_of(profile)
        hosts = self._host[self._host != ANYWHERE]
        self._several = bool(hosts.size) and (int(hosts.min()) != int(hosts.max()) or not hosts.min())

    def hear(self, row: int, before: WorkerLoad | None, load: WorkerLoad, now: float) -> None:
        """A heartbeat; ``before`` is the load of the last one of this life."""
        end = self.ends[row]
        keeps = math.exp(min(0.0, end.heard - now) / FADE)
        came, took = load.kv_bytes, load.kv_seconds
        if before is not None:
            came, took = max(0, came - before.kv_bytes), max(0.0, took - before.kv_seconds)
        end.nbytes = self.nbytes[row] = keeps * end.nbytes + came
        end.seconds = self.seconds[row] = keeps * end.seconds + took
        end.heard = self.heard[row] = now
        # Where all are on one host no network is between them.
        known = end.told if self._several else 0.0
        last, pace = end.pace, _mixed(known or 1.0 / ASSUMED, end.nbytes, end.seconds)
        end.pace = self.pace[row] = pace
        if self._slowest_end is not None and pace >= self._slowest_end:
            self._slowest_end = pace
        elif last == self._slowest_end:
            self._slowest_end = None

    def crossed(self, prefill: int, decode: int, nbytes: int, seconds: float, now: float) -> None:
        """Blocks have gone from one row to another within the last so many seconds, others of them perhaps beside."""
        heard = float(self._pair_heard[decode, prefill])
        keeps = math.exp(min(0.0, heard - now) / FADE)
        # Several at once share the link: only time that no other has counted counts.
        took = min(seconds, max(0.0, now - heard))
        self._pair_bytes[decode, prefill] = keeps * self._pair_bytes[decode, prefill] + nbytes
        self._pair_seconds[decode, prefill] = keeps * self._pair_seconds[decode, prefill] + took
        self._pair_heard[decode, prefill] = now
        pace = self.pair(prefill, decode, now)
        if pace >= self._slowest or now - self._slowest_at > FORGOTTEN:
            self._slowest, self._slowest_at = pace, now

    def send(self, prefill: int, decode: int, seconds: float, now: float) -> None:
        """Blocks will cross from one row to another, for so long: both links are theirs then."""
        until = self.ahead(prefill, decode, now) + now + seconds
        self.ends[prefill].until = self.ends[decode].until = self.until[prefill] = self.until[decode] = until
        self._latest = max(self._latest, until)

    def ahead(self, prefill: int, decode: int, now: float) -> float:
        """Seconds until both ends of a pair have carried what this router has sent over them."""
        return max(0.0, self.ends[prefill].until - now, self.ends[decode].until - now)

    def in_time(self, nbytes: float, seconds: float, now: float) -> bool:
        """Whether so many bytes cross in so many seconds for certain, whichever two workers they cross between."""
        return nbytes * self.most(now) + max(0.0, self._latest - now) <= seconds

    def paces(self, partners: Rows, rows: Rows, now: float) -> Floats:
        """Seconds of a byte to each of ``partners`` (decode) from each of ``rows`` (prefill)."""
        table = self._table
        if table is None or table.partners is not partners or table.rows is not rows:
            table = self._table = self._tabled(partners, rows)
        keeps = np.exp((self.heard[partners] - now) / FADE)
        nbytes, seconds = keeps * self.nbytes[partners], keeps * self.seconds[partners]
        landed = _mixed(table.told, nbytes[:, None], seconds[:, None])
        keeps = np.exp((self._pair_heard.take(table.places) - now) / FADE)
        crossed, took = self._pair_bytes.take(table.places), self._pair_seconds.take(table.places)
        paces: Floats = _mixed(landed, keeps * crossed, keeps * took)
        return paces

    def _tabled(self, partners: Rows, rows: Rows) -> _Table:
        there, here = self._host[partners][:, None], self._host[rows]
        told = np.maximum(self.told[partners][:, None], self.told[rows])
        near = ((there == here) & (there != 0)) | (there == ANYWHERE)
        told = np.where(near | (told == 0.0), 1.0 / ASSUMED, told)
        return _Table(partners, rows, told, partners[:, None] * len(self.told) + rows)

    def pair(self, prefill: int, decode: int, now: float) -> float:
        """The same of one pair."""
        there, here = self.ends[decode], self.ends[prefill]
        told = max(there.told, here.told) or 1.0 / ASSUMED
        if (there.host == here.host and there.host != 0) or there.host == ANYWHERE:
            told = 1.0 / ASSUMED
        keeps = math.exp((there.heard - now) / FADE)
        landed = _mixed(told, keeps * there.nbytes, keeps * there.seconds)
        keeps = math.exp((float(self._pair_heard[decode, prefill]) - now) / FADE)
        nbytes, seconds = float(self._pair_bytes[decode, prefill]), float(self._pair_seconds[decode, prefill])
        return _mixed(landed, keeps * nbytes, keeps * seconds)

    def most(self, now: float) -> float:
        """Seconds that a byte takes between any two at most."""
        slowest = self._slowest_end
        if slowest is None:
            slowest = self._slowest_end = max(float(self.pace.max()), float(self.told.max()))
        return max(slowest, self._slowest) if now - self._slowest_at <= FORGOTTEN else slowest


def _mixed(expected: Number, nbytes: Number, seconds: Number) -> Number:
    """Seconds of a byte: what is expected, and what so many bytes took."""
    return (expected * WEIGHT + seconds) / (WEIGHT + nbytes)


def _host_of(profile: WorkerProfile) -> int:
    """A number of the host of a worker; 0 where that is not known."""
    addresses = (profile.peer_endpoint,) if profile.role == "prefill" else profile.kv_addresses
    names = [name for name in map(_host_name, addresses) if name]
    if names:
        return int.from_bytes(hashlib.blake2b(names[0].encode(), digest_size=7).digest(), "little") + 1
    return ANYWHERE if profile.role == "decode" and addresses else 0


def _host_name(address: str) -> str:
    """Of an address with a port, as those that other hosts can reach; "" of any other."""
    try:
        parts = urlsplit(address)
        return (parts.hostname or "") if parts.port is not None else ""
    except ValueError:
        return ""
