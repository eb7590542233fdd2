"""Several continuations of one prompt that cross as one: the prompt is computed once, and its blocks are shipped once.

A request's *forks* are further requests of the same prompt and sampling that differ by their seed alone. They ride on
its messages (``Prefill.forks``, ``Reserve.forks``, ``Handover.fork_tokens``), and the key of the first names lease and
import of them all. Everything else is each one's own: its tokens, its failure, its cancel, and any later attempt.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Annotated

import msgspec

from protocol.ids import RequestKey
from protocol.sampling import SamplingParams

MAX_FORKS = 1 << 12
"""Most forks of one request."""


class Fork(msgspec.Struct, frozen=True, array_like=True):
    """One more continuation of a request's prompt.

    Attributes:
        key: its own request and attempt.
        seed: of its draws; all else of the sampling is the first one's.
    """

    key: RequestKey
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

    def sampling(self, first: SamplingParams) -> SamplingParams:
        """How it draws, where ``first`` is how the request's first continuation does."""
        return msgspec.structs.replace(first, seed=self.seed)


Forks = Annotated[tuple[Fork, ...], msgspec.Meta(max_length=MAX_FORKS)]


class ForkBook:
    """Which continuations of a prompt are still wanted; pure bookkeeping, by the key of the first.

    Life cycle of a prompt here: opened with its forks, emptied by :meth:`drop`, closed when each goes its own way. A
    key that is not in the book stands for itself alone.
    """

    def __init__(self) -> None:
        self._opened: dict[RequestKey, tuple[RequestKey, ...]] = {}
        self._wanted: dict[RequestKey, dict[RequestKey, None]] = {}
        self._first_of: dict[RequestKey, RequestKey] = {}

    def __len__(self) -> int:
        return len(self._wanted)

    def open(self, first: RequestKey, forks: Iterable[Fork]) -> None:
        """``first`` and its ``forks`` are wanted; without forks there is nothing to remember."""
        keys = (first, *(fork.key for fork in forks))
        if len(keys) > 1:
            self._opened[first] = keys
            self._wanted[first] = dict.fromkeys(keys)
            self._first_of.update(dict.fromkeys(keys, first))

    def newcomers(
        self, first: RequestKey, forks: Iterable[Fork], known: Container[RequestKey] = ()
    ) -> tuple[RequestKey, ...]:
        """Keys among these that nothing goes by yet, each once; where that is all of them, they may be opened.

        Args:
            first: of a request.
            forks: its others.
            known: keys in use that the book needs not hold.
        """
        keys = dict.fromkeys((first, *(fork.key for fork in forks)))
        return tuple(key for key in keys if key not in self._first_of and key not in known)

    def first_of(self, key: RequestKey) -> RequestKey:
        """Whose lease and import serve ``key``."""
        return self._first_of.get(key, key)

    def wanted(self, first: RequestKey) -> tuple[RequestKey, ...]:
        """Who is still wanted of what was opened as ``first``."""
        return tuple(self._wanted.get(first, (first,)))

    def drop(self, key: RequestKey) -> bool:
        """``key`` is not wanted any more; True when nobody else is who came with it, so that all of it can end."""
        wanted = self._wanted.get(self.first_of(key))
        if wanted is None:
            return True
        wanted.pop(key, None)
        return not wanted

    def close(self, first: RequestKey) -> tuple[RequestKey, ...]:
        """Forget what was opened as ``first``; returns who was still wanted of it."""
        wanted = self.wanted(first)
        self._wanted.pop(first, None)
        for key in self._opened.pop(first, ()):
            if self._first_of.get(key) == first:
                del self._first_of[key]
        return wanted
