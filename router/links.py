"""What blocks take from one worker to another: by the links that workers tell of, and by what ships took lately.

A worker tells how fast its network is, so the first blocks of all are reckoned with at no more than the slower end's
speed. What landed at a worker, as its heartbeats have it, counts against that, and what this router saw of a pair
against both: the more of it the more bytes it was, and less and less as time goes by, for links change.

Life cycle of a row: told of each heartbeat of its worker, of each ship and of what is sent, and forgotten with it.
"""

from __future__ import annotations

import hashlib
import math
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
        self._host: Rows = np.full(rows, ANYWHERE, dtype=np.int64)
        self._several = False
        # Pages of zeros cost nothing until a pair is written.
        self._pair_bytes, self._pair_seconds = (np.zeros((rows, rows), np.float32) for _ in range(2))
        self._pair_heard = np.zeros((rows, rows))
        self._slowest, self._slowest_at = 0.0, -math.inf
        self._table: _Table | None = None

    def grow(self, rows: int) -> None:
        """There are more rows."""
        more = rows - len(self.told)
        self._table = None
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
        self.nbytes[row] = self.seconds[row] = 0.0
        self.heard[row] = self.until[row] = now
        self._pair_bytes[row] = self._pair_seconds[row] = 0.0
        self._pair_bytes[:, row] = self._pair_seconds[:, row] = 0.0

    def know(self, row: int, profile: WorkerProfile) -> None:
        """A worker is what its profile says."""
        layout = profile.layout
        self._table = None
        self.token_bytes[row] = layout.block_bytes / layout.block_size
        self.told[row] = 1.0 / profile.link_rate if profile.link_rate > 0.0 else 0.0
        self._host[row] = _host_of(profile)
        hosts = self._host[self._host != ANYWHERE]
        self._several = bool(hosts.size) and (int(hosts.min()) != int(hosts.max()) or not hosts.min())

    def hear(self, row: int, before: WorkerLoad | None, load: WorkerLoad, now: float) -> None:
        """A heartbeat; ``before`` is the load of the last one of this life."""
        keeps = math.exp(min(0.0, float(self.heard[row]) - now) / FADE)
        came, took = load.kv_bytes, load.kv_seconds
        if before is not None:
            came, took = max(0, came - before.kv_bytes), max(0.0, took - before.kv_seconds)
        self.nbytes[row] = keeps * self.nbytes[row] + came
        self.seconds[row] = keeps * self.seconds[row] + took
        self.heard[row] = now
        # Where all are on one host no network is between them.
        known = float(self.told[row]) if self._several else 0.0
        self.pace[row] = _mixed(known or 1.0 / ASSUMED, float(self.nbytes[row]), float(self.seconds[row]))

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
        self.until[[prefill, decode]] = self.ahead(prefill, decode, now) + now + seconds

    def ahead(self, prefill: int, decode: int, now: float) -> float:
        """Seconds until both ends of a pair have carried what this router has sent over them."""
        return max(0.0, float(self.until[prefill]) - now, float(self.until[decode]) - now)

    def in_time(self, nbytes: float, seconds: float, partners: Rows, rows: Rows, now: float) -> bool:
        """Whether so many bytes cross in so many seconds for certain, whichever two of them they cross between."""
        ahead = max(0.0, float(self.until[partners].max()) - now, float(self.until[rows].max()) - now)
        return nbytes * self.most(now) + ahead <= seconds

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
        there, here = self._host[decode], self._host[prefill]
        told = max(float(self.told[decode]), float(self.told[prefill])) or 1.0 / ASSUMED
        if (there == here and there != 0) or there == ANYWHERE:
            told = 1.0 / ASSUMED
        keeps = math.exp((float(self.heard[decode]) - now) / FADE)
        landed = _mixed(told, keeps * float(self.nbytes[decode]), keeps * float(self.seconds[decode]))
        keeps = math.exp((float(self._pair_heard[decode, prefill]) - now) / FADE)
        nbytes, seconds = float(self._pair_bytes[decode, prefill]), float(self._pair_seconds[decode, prefill])
        return _mixed(landed, keeps * nbytes, keeps * seconds)

    def most(self, now: float) -> float:
        """Seconds that a byte takes between any two at most."""
        slowest = max(float(self.pace.max()), float(self.told.max()))
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
