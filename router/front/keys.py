"""API keys: who may ask, how often, and how much at the same time.

The file holds hashes, never keys; ``kvferry key NAME`` makes an entry::

    keys:
      - name: alice
        sha256: 9f86d081884c7d65...
        requests_per_minute: 600   # no bound where it is left out
        max_requests: 32           # at the same time; no bound where it is left out
      slo_class: batch           # of its requests; they may name one where it is left out
      weight: 2.0                # its share while others wait too; 1 where it is left out

Life cycle of a :class:`Gatekeeper`: made once; :meth:`~Gatekeeper.check` for every request, :meth:`~Gatekeeper.enter`
and :meth:`~Gatekeeper.leave` around those that generate or tokenise. It reads no clock.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from protocol.errors import ConfigError, RateLimited, Unauthorized
from router.slo.classes import MAX_CLASS_NAME, MAX_WEIGHT, SLOConfig

MAX_FILE_BYTES = 4 << 20
MAX_KEYS = 20_000
PREFIX = "kvf-"
"""What a key begins with, so that one in the wrong place is found."""
MAX_HEADER = 512
"""Bytes of an ``Authorization`` header that are looked at."""

Rate = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry.

    Attributes:
        name: of whoever has the key; it may be logged.
        sha256: of the key, in hexadecimal. Keys are random, so a plain hash cannot be turned around.
        requests_per_minute: as many may also come at once.
        max_requests: that are being answered at the same time.
        slo_class: that all its requests are of, a name in the router's ``slo``; None lets each name one.
        weight: its share of the tokens, beside those of other keys, while requests wait.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    requests_per_minute: Rate | None = None
    max_requests: Count | None = None
    slo_class: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CLASS_NAME)] | None = None
    weight: Annotated[float, msgspec.Meta(gt=0, le=MAX_WEIGHT)] = 1.0


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    keys: Annotated[list[Key], msgspec.Meta(min_length=1, max_length=MAX_KEYS)]


def hash_of(key: str) -> str:
    """What the file holds of ``key``."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def new_key() -> str:
    """A fresh key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def read_keys(path: str | Path) -> tuple[Key, ...]:
    """The entries of a file.

    Raises:
        ConfigError: it cannot be read, is not of that form, or a name or hash stands twice; names what.
    """
    try:
        if Path(path).stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"api_keys: {path} has more than {MAX_FILE_BYTES} bytes", field="api_keys")
        found = msgspec.yaml.decode(Path(path).read_bytes(), type=KeyFile).keys
    except OSError as error:
        raise ConfigError(f"api_keys: cannot read {path}: {error.strerror}", field="api_keys") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"api_keys: {path}: {error}", field="api_keys") from error
    for what, values in (("name", [key.name for key in found]), ("sha256", [key.sha256 for key in found])):
        twice, count = Counter(values).most_common(1)[0]
        if count > 1:
            raise ConfigError(f"api_keys: {path}: {what} {twice!r} stands twice", field="api_keys")
    return tuple(found)


def check_classes(keys: Iterable[Key], slo: SLOConfig) -> None:
    """See that every class that a key is bound to is there.

    Raises:
        ConfigError: one is not; names the key and the class.
    """
    for key in keys:
        if key.slo_class is not None and key.slo_class not in slo.names:
            known = ", ".join(slo.names)
            raise ConfigError(
                f"api_keys: key {key.name!r}: slo_class must be one of {known}, got {key.slo_class!r}", field="api_keys"
            )


class Holder:
    """What one key has left."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.open = 0
        self._left = self._most = max(1.0, key.requests_per_minute or 1.0)
        self._seen: float | None = None

    def take(self, now: float) -> None:
        """Count one request.

        Raises:
            RateLimited: it is one too many; says when to come again.
        """
        rate, bound = self.key.requests_per_minute, self.key.max_requests
        if bound is not None and self.open >= bound:
            raise RateLimited(f"{bound} requests of this key are being answered; it may have no more at a time", 1.0)
        if rate is not None:
            if self._seen is not None:
                self._left = min(self._most, self._left + (now - self._seen) * rate / 60.0)
            self._seen = now
            if self._left < 1.0:
                wait = (1.0 - self._left) * 60.0 / rate
                raise RateLimited(f"this key may ask {rate:g} times a minute", wait)
            self._left -= 1.0
        self.open += 1


class Gatekeeper:
    """Knows the keys of one router.

    Args:
        keys: with none of them, everybody is let in.
    """

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._holders = {key.sha256: Holder(key) for key in keys}

    def check(self, authorization: bytes) -> Holder | None:
        """Whose key the ``Authorization`` header shows; None where none is needed.

        Raises:
            Unauthorized: it shows none that is known.
        """
        if not self._holders:
            return None
        scheme, _, key = authorization[:MAX_HEADER].decode("latin-1").partition(" ")
        # Looked up by its hash: how long that takes tells nothing of any key.
        holder = self._holders.get(hash_of(key.strip())) if scheme.lower() == "bearer" else None
        if holder is None:
            raise Unauthorized("an API key of this router is needed: Authorization: Bearer KEY")
        return holder

    def enter(self, holder: Holder | None, now: float) -> None:
        """A request that generates, or tokenises, begins.

        Raises:
            RateLimited: the key may not ask now.
        """
        if holder is not None:
            holder.take(now)

    def leave(self, holder: Holder | None) -> None:
        """A request that was let in has been answered."""
        if holder is not None:
            holder.open -= 1
            assert holder.open >= 0, "left more often than entered"
