"""Streams without a pause, by clients on one host, each held against the text that it must give."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from namespaces import Host

from protocol.errors import KVFerryError
from router.client import Client

RIGHT, WRONG = "right", "wrong"
HUNG_SECONDS = 120.0
"""For a stream to say nothing for so long is to hang."""
PAUSE_SECONDS = 0.2
"""After an error."""


@dataclass(frozen=True, slots=True)
class Script:
    """A prompt, and its greedy text of so many tokens."""

    prompt: tuple[int, ...]
    truth: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A stream that is over.

    Attributes:
        begun, ended: monotonic seconds.
        how: "right", "wrong", or the code of the error that it ended with.
    """

    begun: float
    ended: float
    how: str


@dataclass(frozen=True, slots=True)
class Account:
    """What became of the streams of some time.

    Attributes:
        ends: how many of each kind.
        longest: seconds of the one that took longest.
        silence: most seconds in which none ended right.
    """

    ends: Counter[str]
    longest: float
    silence: float


class SteadyLoad:
    """See the module."""

    def __init__(self, host: Host, url: str, model: str, scripts: Sequence[Script], clients: int) -> None:
        self._host, self._url, self._model, self._scripts = host, url, model, scripts
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]
        self._ended: list[Ended] = []
        self._served = [0.0] * clients

    @contextmanager
    def running(self) -> Iterator[None]:
        """Clients ask until the context ends, and finish what they have asked then."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()

    def serves_all(self, since: float) -> bool:
        """Whether each client has had its text from a stream that began at ``since`` or later."""
        assert all(thread.is_alive() for thread in self._threads), "a client has ended by an error of its own"
        return min(self._served) >= since

    def account(self, since: float) -> Account:
        """Of the streams that ended at ``since`` or later; to be asked when none is running."""
        ended = [each for each in self._ended if each.ended >= since]
        right = sorted(each.ended for each in ended if each.how == RIGHT)
        return Account(
            ends=Counter(each.how for each in ended),
            longest=max(each.ended - each.begun for each in ended),
            silence=max(later - earlier for earlier, later in zip([since, *right], right, strict=False)),
        )

    def _ask(self, number: int) -> None:
        rng = random.Random(number)
        with self._host.inside(), Client(self._url, model=self._model, retries=0, timeout=HUNG_SECONDS) as client:
            while not self._over.is_set():
                begun = time.monotonic()
                how = self._stream(client, rng.choice(self._scripts))
                self._ended.append(Ended(begun, time.monotonic(), how))
                if how == RIGHT:
                    self._served[number] = begun
                else:
                    self._over.wait(PAUSE_SECONDS)

    @staticmethod
    def _stream(client: Client, script: Script) -> str:
        text = ""
        try:
            with client.stream(list(script.prompt), max_tokens=script.tokens, temperature=0, ignore_eos=True) as stream:
                for chunk in stream:
                    text += chunk.text
        except KVFerryError as error:
            return error.code if script.truth.startswith(text) else WRONG
        return RIGHT if text == script.truth else WRONG
